"""The RAM tier's images: slabs of one shared arena. They live as long as the tier's process.

A slab that is freed loses its magic at once, before anybody else gets it: a reader that still copies from it finds another
header afterwards, and throws away what it copied.
"""

from collections.abc import Callable, Sequence

from barrel_inference.protocol import Location, Roomed, Tier, Touch
from barrel_inference.tiers import kvc
from barrel_inference.tiers.arena import Arena
from barrel_inference.tiers.files import stored_row
from barrel_inference.tiers.headroom import MEMORY_SHARE, RESERVE_BYTES
from barrel_inference.tiers.leases import Lease, Leases, Owner
from barrel_inference.tiers.store import Scan, Stats, Want

# Address space for a quota that grows later, on machines with more memory than anybody gives to a cache.
_LARGEST_BYTES = 1 << 40


class MemoryStore:
    """A `Store` in an arena; places are offsets."""

    kind = Tier.RAM

    def __init__(self, server: str, incarnation: int, quota_bytes: int, free_memory: Callable[[], int]) -> None:
        self._server = server
        self._incarnation = incarnation
        self._free_memory = free_memory
        free_bytes = free_memory()
        self.quota_bytes, self.note = lowered_to_memory(quota_bytes, free_bytes)
        self.arena = Arena(self.quota_bytes, largest_bytes=min(free_bytes, _LARGEST_BYTES))
        self.leases: Leases[int] = Leases()
        self._rows: dict[int, Want] = {}  # key and size by offset
        self._stored_bytes = 0

    def set_quota(self, quota_bytes: int) -> None:
        """See `Store.set_quota`."""
        held_bytes = self.arena.allocated_bytes + self.arena.warm_bytes
        usable_bytes, self.note = lowered_to_memory(quota_bytes, self._free_memory(), held_bytes)
        if usable_bytes > self.arena.largest_bytes:
            usable_bytes = self.arena.largest_bytes
            self.note = f"quota lowered from {quota_bytes} to {usable_bytes} bytes until {self._server} is restarted"
        self.quota_bytes = usable_bytes
        self.arena.resize(usable_bytes)

    def room(self, owner: Owner, deletes: Sequence[Location], wants: Sequence[Want], *, give_back: bool) -> Roomed:
        """See `Store.room`."""
        freed = sum(self._delete(location, give_back=give_back) for location in deletes)
        # A touched page over a control group's limit is death, not an error. Warm memory is counted as taken already.
        spare_bytes = self._free_memory() - RESERVE_BYTES + self.arena.warm_bytes if wants else 0
        locations: list[Location | None] = []
        refused_bytes = 0
        for want in wants:
            if want.size_bytes > spare_bytes:
                locations.append(None)
                refused_bytes += want.size_bytes
                continue
            offset = self.arena.allocate(want.size_bytes)
            if offset is None:
                locations.append(None)
                continue
            spare_bytes -= want.size_bytes
            location = Location(self._server, self._incarnation, want.size_bytes, offset)
            self._wipe(location)
            self.leases.add(offset, Lease(owner, want.key, location))
            locations.append(location)
        lacking_bytes = max(0, refused_bytes - spare_bytes) if refused_bytes else 0
        return Roomed(locations=locations, freed_bytes=freed, lacking_bytes=lacking_bytes)

    def committed(self, location: Location) -> Scan:
        """See `Store.committed`."""
        lease = self.leases.get(location.offset) if self._is_ours(location) else None
        if lease is None:
            return Scan()
        self.leases.end(location.offset)
        self._rows[location.offset] = Want(lease.key, lease.location.size_bytes)
        self._stored_bytes += lease.location.size_bytes
        return self.read([location.offset]) if lease.inherited else Scan()

    def free(self, locations: Sequence[Location], living: frozenset[Owner]) -> Scan:
        """See `Store.free`."""
        for location in locations:
            lease = self.leases.get(location.offset) if self._is_ours(location) else None
            if lease is not None and not (lease.inherited and lease.owner in living):
                self._end_lease(location.offset, give_back=False)
        return Scan()

    def touch(self, touch: Touch) -> None:
        """See `Store.touch`."""
        row = self._rows.get(touch.location.offset) if self._is_ours(touch.location) else None
        if row is not None:
            trailer = kvc.Trailer(touch.last_used_unix_s, touch.hits, touch.pinned, kvc.marks_of(touch.marks))
            end = touch.location.offset + row.size_bytes
            self.arena.view(end - kvc.TRAILER_BYTES, kvc.TRAILER_BYTES)[:] = kvc.pack_trailer(trailer)

    def flush(self) -> None:
        """Nothing waits: trailers are written at once."""

    def delete(self, location: Location) -> int:
        """See `Store.delete`."""
        return self._delete(location, give_back=False)

    def hand_over(self, now_s: float) -> None:
        """See `Store.hand_over`."""
        for offset in self.leases.hand_over(now_s):
            self._end_lease(offset, give_back=False)

    def owner_died(self, owner: Owner) -> Scan:
        """See `Store.owner_died`."""
        for offset in self.leases.note_death(owner):
            self._end_lease(offset, give_back=False)
        return Scan()

    def expire(self, now_s: float) -> Scan:
        """See `Store.expire`."""
        for offset in self.leases.expired(now_s):
            self._end_lease(offset, give_back=False)
        return Scan()

    def places(self) -> list[int]:
        """See `Store.places`."""
        return list(self._rows)

    def read(self, places: Sequence[int]) -> Scan:
        """See `Store.read`."""
        rows, corrupt = [], []
        for offset in places:
            row = self._rows.get(offset)
            if row is None:
                continue
            key, size_bytes = row
            view = self.arena.view(offset, size_bytes)
            location = Location(self._server, self._incarnation, size_bytes, offset)
            try:
                end = kvc.prefix_bytes(bytes(view[: kvc.HEADER_BYTES]))
                trailer = bytes(view[size_bytes - kvc.TRAILER_BYTES :])
                meta, _layout, state = kvc.read_meta(bytes(view[:end]), size_bytes, trailer)
            except kvc.CorruptImage:
                corrupt.append(key)
                self._delete(location, give_back=False)
                continue
            rows.append(stored_row(meta, state, location))
        return Scan(rows=tuple(rows), corrupt=tuple(corrupt))

    def sweep(self, now_unix_s: float, dead_pids: frozenset[int], live_pids: frozenset[int] = frozenset()) -> Scan:
        """Nothing can turn up in memory, or vanish from it, behind our back."""
        return Scan()

    def stats(self) -> Stats:
        """See `Store.stats`."""
        return Stats(self._stored_bytes, self.leases.bytes, len(self._rows))

    def close(self) -> None:
        """Let go of the arena."""
        self.arena.close()

    def _is_ours(self, location: Location) -> bool:
        """An offset of a dead incarnation means nothing here."""
        return location.incarnation == self._incarnation

    def _delete(self, location: Location, *, give_back: bool) -> int:
        if not self._is_ours(location):
            return 0
        row = self._rows.pop(location.offset, None)
        if row is None:
            return self._end_lease(location.offset, give_back=give_back)
        self._stored_bytes -= row.size_bytes
        self._release(location, give_back=give_back)
        return row.size_bytes

    def _end_lease(self, offset: int, *, give_back: bool) -> int:
        lease = self.leases.end(offset)
        if lease is None:
            return 0
        self._release(lease.location, give_back=give_back)
        return lease.location.size_bytes

    def _release(self, location: Location, *, give_back: bool) -> None:
        self._wipe(location)
        self.arena.free(location.offset, give_back=give_back)

    def _wipe(self, location: Location) -> None:
        kvc.invalidate(self.arena.view(location.offset, kvc.HEADER_BYTES))


def lowered_to_memory(quota_bytes: int, free_bytes: int, held_bytes: int = 0) -> tuple[int, str]:
    """The quota that the machine's free memory allows beside what is held already, and why it is less than was asked for."""
    allowed = held_bytes + int(free_bytes * MEMORY_SHARE)
    if quota_bytes <= allowed:
        return quota_bytes, ""
    return allowed, (
        f"quota lowered from {quota_bytes} to {allowed} bytes: {free_bytes} bytes of memory are free, "
        f"{MEMORY_SHARE:.0%} of that may be planned with"
    )
