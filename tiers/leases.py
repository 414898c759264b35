"""Places that were promised and are being written: who has them, and for which index they were made. Pure."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from barrel_inference.protocol import Location

P = TypeVar("P", bound=Hashable)

# Packing and publishing an image takes milliseconds, writing it to a slow disk seconds.
INHERITED_TTL_S = 120.0


class Owner(NamedTuple):
    """The process that writes, and which life of it."""

    id: str
    incarnation: int


@dataclass(slots=True)
class Lease:
    """One promised place."""

    owner: Owner
    key: bytes
    location: Location
    inherited_s: float | None = None  # since when (monotonic) there is an index that does not know of it
    owner_died: bool = False

    @property
    def inherited(self) -> bool:
        """Is it unknown to the present index?"""
        return self.inherited_s is not None


class Leases(Generic[P]):
    """All leases of a store, by place."""

    def __init__(self) -> None:
        self._by_place: dict[P, Lease] = {}
        self.bytes = 0

    def __contains__(self, place: P) -> bool:
        return place in self._by_place

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._by_place.values())

    def get(self, place: P) -> Lease | None:
        """The lease of a place."""
        return self._by_place.get(place)

    def add(self, place: P, lease: Lease) -> None:
        """Note a promise; an earlier one of the same place is replaced."""
        self.end(place)
        self._by_place[place] = lease
        self.bytes += lease.location.size_bytes

    def end(self, place: P) -> Lease | None:
        """Forget a promise; returns what it was."""
        lease = self._by_place.pop(place, None)
        if lease is not None:
            self.bytes -= lease.location.size_bytes
        return lease

    def note_death(self, owner: Owner) -> list[P]:
        """Remember that an owner died. Its leases are the index's to end; those that it does not know of are returned."""
        for lease in self:
            if lease.owner == owner:
                lease.owner_died = True
        return [place for place, lease in self._by_place.items() if lease.owner_died and lease.inherited]

    def hand_over(self, now_s: float) -> list[P]:
        """A new index takes over: mark all as inherited; returns the places of dead owners, which nobody will publish."""
        for lease in self:
            if lease.inherited_s is None:
                lease.inherited_s = now_s
        return [place for place, lease in self._by_place.items() if lease.owner_died]

    def expired(self, now_s: float) -> list[P]:
        """Places that were inherited long ago: whoever was writing there has given up."""
        return [
            place for place, lease in self._by_place.items()
            if lease.inherited_s is not None and now_s - lease.inherited_s > INHERITED_TTL_S
        ]  # fmt: skip
