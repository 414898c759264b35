"""Which part of an arena goes to whom: first fit, freed memory reused warm first. Pure.

A range is allocated, or free. Of the free bytes some are *warm*: the system still keeps memory for them, and writing there
costs no page faults. What is allocated plus what is warm never comes to exceed `capacity_bytes`; an `Allocation` therefore
names the warm ranges whose memory must go back to the system first.

Offsets and sizes are multiples of `GRAIN_BYTES`, the alignment of images, so the bytes counted here are exactly the bytes
that the index counts. Memory comes in pages: at the border between an allocated and a given-back range one page may stay.
"""

import itertools
from bisect import bisect_left, bisect_right
from typing import NamedTuple

GRAIN_BYTES = 64


class Range(NamedTuple):
    """Bytes from `start` to `end`, the end not included."""

    start: int
    end: int


class Allocation(NamedTuple):
    """Where it is, and what must be given back to the system before it is written to."""

    offset: int
    punch: list[Range]


class RangeSet:
    """Disjoint ranges in order; touching ones are one."""

    def __init__(self, ranges: list[Range] | None = None) -> None:
        self._starts = [one.start for one in ranges or []]
        self._ends = [one.end for one in ranges or []]
        self.bytes = sum(self._ends) - sum(self._starts)

    def __iter__(self) -> "zip[tuple[int, int]]":
        return zip(self._starts, self._ends, strict=True)

    def first_fit(self, size_bytes: int) -> int | None:
        """Start of the first range that long."""
        for start, end in self:
            if end - start >= size_bytes:
                return start
        return None

    def around(self, offset: int) -> Range | None:
        """The range that contains this byte."""
        at = bisect_right(self._starts, offset) - 1
        if at >= 0 and offset < self._ends[at]:
            return Range(self._starts[at], self._ends[at])
        return None

    def add(self, start: int, end: int) -> None:
        """Add a range, no byte of which is in the set."""
        at = bisect_left(self._starts, start)
        self.bytes += end - start
        if at < len(self._starts) and self._starts[at] == end:
            end = self._ends[at]
            del self._starts[at], self._ends[at]
        if at > 0 and self._ends[at - 1] == start:
            self._ends[at - 1] = end
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)

    def discard(self, start: int, end: int) -> list[Range]:
        """Take a range out; returns the parts of it that were in the set."""
        gone = []
        at = max(0, bisect_right(self._starts, start) - 1)
        while at < len(self._starts) and self._starts[at] < end:
            low, high = self._starts[at], self._ends[at]
            cut = Range(max(low, start), min(high, end))
            if cut.start >= cut.end:
                at += 1
                continue
            gone.append(cut)
            self.bytes -= cut.end - cut.start
            left = [Range(a, b) for a, b in ((low, cut.start), (cut.end, high)) if a < b]
            self._starts[at : at + 1] = [one.start for one in left]
            self._ends[at : at + 1] = [one.end for one in left]
            at += len(left)
        return gone

    def last(self) -> Range:
        """The range with the highest offset."""
        return Range(self._starts[-1], self._ends[-1])


class Extents:
    """The allocator of one arena."""

    def __init__(self, capacity_bytes: int, virtual_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = 0
        self._sizes: dict[int, int] = {}
        self._free = RangeSet([Range(0, virtual_bytes)])
        self._warm = RangeSet()  # part of _free

    @property
    def warm_bytes(self) -> int:
        """Free bytes that still have memory."""
        return self._warm.bytes

    def size_of(self, offset: int) -> int | None:
        """Size of what is allocated there; None when nothing is."""
        return self._sizes.get(offset)

    def allocate(self, size_bytes: int) -> Allocation | None:
        """A place of that size; None when the capacity does not allow it."""
        size_bytes = max(GRAIN_BYTES, rounded(size_bytes))
        if self.allocated_bytes + size_bytes > self.capacity_bytes:
            return None
        offset = self._warm.first_fit(size_bytes)
        if offset is None:
            offset = self._free.first_fit(size_bytes)
        if offset is None:
            return None
        self._free.discard(offset, offset + size_bytes)
        self._warm.discard(offset, offset + size_bytes)
        self._sizes[offset] = size_bytes
        self.allocated_bytes += size_bytes
        return Allocation(offset, self._shrink_warm(self.capacity_bytes - self.allocated_bytes))

    def free(self, offset: int, *, give_back: bool) -> Range | None:
        """Take an allocation back; what is returned is free and should lose its memory (None: keep it warm).

        Memory above a capacity that was made smaller goes, whatever `give_back` says.
        """
        size_bytes = self._sizes.pop(offset)
        self.allocated_bytes -= size_bytes
        self._free.add(offset, offset + size_bytes)
        if not give_back and self.allocated_bytes + self._warm.bytes + size_bytes <= self.capacity_bytes:
            self._warm.add(offset, offset + size_bytes)
            return None
        return Range(offset, offset + size_bytes)

    def resize(self, capacity_bytes: int) -> list[Range]:
        """From now on this much may be allocated; what is returned should lose its memory.

        Allocations above a smaller capacity stay until they are freed.
        """
        self.capacity_bytes = capacity_bytes
        return self._shrink_warm(max(0, capacity_bytes - self.allocated_bytes))

    def free_around(self, start: int, end: int) -> Range:
        """The whole free range that contains this one: pages at its border may be given back as well."""
        found = self._free.around(start)
        assert found is not None
        assert found.end >= end
        return found

    def check(self) -> None:
        """Assert what must hold at any time."""
        assert self.allocated_bytes == sum(self._sizes.values())
        assert not self._warm.bytes or self.allocated_bytes + self._warm.bytes <= self.capacity_bytes
        taken = sorted([(o, o + s) for o, s in self._sizes.items()] + list(self._free))
        assert all(before[1] == after[0] for before, after in itertools.pairwise(taken))
        for start, end in self._warm:
            around = self._free.around(start)
            assert around is not None
            assert around.end >= end

    def _shrink_warm(self, limit_bytes: int) -> list[Range]:
        """Take warm ranges out, from the far end, until no more than that is warm."""
        gone: list[Range] = []
        while (excess := self._warm.bytes - limit_bytes) > 0:
            start, end = self._warm.last()
            gone += self._warm.discard(max(start, end - excess), end)
        return gone


def rounded(size_bytes: int) -> int:
    """The size in whole grains."""
    return -(-size_bytes // GRAIN_BYTES) * GRAIN_BYTES
