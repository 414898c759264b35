"""What a tier keeps its images in, in words. Pure.

A store owns bytes: it promises places, deletes, scans, reports. It decides nothing about what is worth keeping; that is the
index's. Two exist, `store_memory` (an arena) and `store_files` (a directory), and the same contract tests run on both, the
latter on tmpfs and on disk (tests/contracts/test_store.py).

A place is promised to an owner (*leased*) before it is written, and is a *row* once the index says that it was published.
Leased and stored bytes together never exceed the quota. All methods block, and belong to one thread at a time.

Nothing here raises for a disk that is full, read-only or damaged, or for files that vanished: places are refused, rows are
reported as gone.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from barrel_inference.protocol import Location, Roomed, StoredRow, Tier, Touch
from barrel_inference.tiers.leases import Leases, Owner

P = TypeVar("P", bound=Hashable)


class Want(NamedTuple):
    """Room that is asked for."""

    key: bytes
    size_bytes: int


class Scan(NamedTuple):
    """What a look at the bytes found."""

    rows: tuple[StoredRow, ...] = ()  # complete; the index has to hear of them
    gone: tuple[bytes, ...] = ()  # keys whose bytes vanished
    corrupt: tuple[bytes, ...] = ()  # keys whose bytes were unreadable, and were removed


class Stats(NamedTuple):
    """A store's own figures."""

    stored_bytes: int
    leased_bytes: int
    rows: int


class Store(Protocol[P]):
    """One tier's bytes; `P` is how it names a place (offset or path)."""

    kind: Tier
    quota_bytes: int  # what is really there to use: what was asked for, or less
    note: str  # why the quota was lowered, or why nothing is taken; empty = all is well
    leases: Leases[P]

    def set_quota(self, quota_bytes: int) -> None:
        """Have this quota from now on, as far as it can be had: `quota_bytes` and `note` say so.

        Rows above a smaller one stay until the index has them deleted; until then no place is promised.
        """

    def room(self, owner: Owner, deletes: Sequence[Location], wants: Sequence[Want], *, give_back: bool) -> Roomed:
        """Delete, then promise places: one location per want, in order, None where there is no room."""

    def committed(self, location: Location) -> Scan:
        """A leased place was published: it is a row. The scan has the row if the present index cannot know its content."""

    def free(self, locations: Sequence[Location], living: frozenset[Owner]) -> Scan:
        """Leased places were given up. The scan has the row of one that turns out to be complete.

        Memory that a dead index had promised to a process that lives stays until `expire`: it may still be writing there,
        and two writers in one place would vouch for each other's bytes.
        """

    def touch(self, touch: Touch) -> None:
        """Recency, hits, marks and pin of a row, for its trailer; on the medium after `flush` at the latest."""

    def flush(self) -> None:
        """Write the trailers that wait."""

    def delete(self, location: Location) -> int:
        """Delete a row, or end a lease; the bytes that this freed, 0 for an unknown one."""

    def hand_over(self, now_s: float) -> None:
        """A new index takes over: leases of dead owners end, the others are inherited."""

    def owner_died(self, owner: Owner) -> Scan:
        """Its inherited leases end, as in `free`; of the others the index decides."""

    def expire(self, now_s: float) -> Scan:
        """Leases that were inherited long ago end, as in `free`."""

    def places(self) -> list[P]:
        """Every row's place now, for `read`."""

    def read(self, places: Sequence[P]) -> Scan:
        """Rows at these places by their headers. Places that are rows no more are left out; rows without bytes are reported."""

    def sweep(self, now_unix_s: float, dead_pids: frozenset[int], live_pids: frozenset[int] = frozenset()) -> Scan:
        """Compare with the medium: complete images that nobody knows become rows, leftovers of dead writers go.

        Args:
            live_pids: what these write is no leftover, however old the clock says it is.
        """

    def stats(self) -> Stats:
        """Bytes and rows."""

    def close(self) -> None:
        """Flush, and let go."""
