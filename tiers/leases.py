"""Places that were promised and are being written: who has them, and for which index they were made. Pure."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from barrel_inference.protocol import Location

P = TypeVar("P", bound=Hashable)


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
    inherited: bool = (
        False  # made for an index that has died since: the present one does not know what is written there
    )
    owner_died: bool = False


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

    def note_death(self, owner: Owner) -> None:
        """Remember that an owner died; its leases stay until somebody decides."""
        for lease in self:
            if lease.owner == owner:
                lease.owner_died = True

    def hand_over(self) -> list[P]:
        """A new index takes over: mark all as inherited; returns the places of dead owners, which nobody will publish."""
        for lease in self:
            lease.inherited = True
        return [place for place, lease in self._by_place.items() if lease.owner_died]
