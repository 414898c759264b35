"""Where a save is cut into nodes, and where a stored prefix meets the caller's tokens. Pure.

A node holds at most `block_tokens` tokens, never crosses a multiple of `block_tokens`, and starts where its parent ends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise


def cut_points(start: int, end: int, block_tokens: int, extra: Sequence[int] = ()) -> list[tuple[int, int]]:
    """The ranges of the nodes that cover [start, end): cut at the grid, and at each extra point inside."""
    grid = range((start // block_tokens + 1) * block_tokens, end, block_tokens)
    points = sorted({start, end, *grid, *(point for point in extra if start < point < end)})
    return list(pairwise(points))


@dataclass(frozen=True, slots=True)
class Seam:
    """The last point that is a token boundary on both sides, all bytes before it being equal."""

    stored_tokens: int
    caller_tokens: int
    retokenised: bool  # the two sides split the bytes before the seam differently


NO_SEAM = Seam(0, 0, False)


def find_seam(stored: Sequence[int], caller: Sequence[int], rendered: Callable[[int], bytes]) -> Seam:
    """Compare two token sequences by their rendered bytes, no further than these are equal."""
    same = common_prefix(stored, caller)
    best = Seam(same, same, False)
    # From here the ids differ; the bytes may go on agreeing under another split.
    stored_at = caller_at = same
    stored_rest = caller_rest = b""  # of the last token taken, what the other side has not matched yet
    while True:
        if not stored_rest:
            if stored_at == len(stored):
                return best
            stored_rest, stored_at = rendered(stored[stored_at]), stored_at + 1
        if not caller_rest:
            if caller_at == len(caller):
                return best
            caller_rest, caller_at = rendered(caller[caller_at]), caller_at + 1
        size = min(len(stored_rest), len(caller_rest))
        if stored_rest[:size] != caller_rest[:size]:
            return best
        stored_rest, caller_rest = stored_rest[size:], caller_rest[size:]
        if not stored_rest and not caller_rest:
            best = Seam(stored_at, caller_at, True)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many items at the start are equal: halves compared as slices, which is memcmp for bytes and fast for lists."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
