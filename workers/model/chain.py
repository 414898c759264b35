"""Where a save is cut into nodes, and where a stored prefix meets the caller's tokens. Pure.

A node holds at most `block_tokens` tokens, never crosses a multiple of `block_tokens`, and starts where its parent ends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


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


def find_seam(
    stored: Sequence[int],
    caller: Sequence[int],
    rendered: Callable[[int], bytes],
    *,
    stored_limit_bytes: int | None = None,
) -> Seam:
    """Compare two token sequences by their rendered bytes.

    Args:
        stored_limit_bytes: no more of the stored side is known to match (a lookup's matched bytes); None = compare all.
    """
    same = common_prefix(stored, caller)
    best = Seam(same, same, False)
    if same == len(stored) or same == len(caller):
        return best
    # From here the ids differ; the bytes may go on agreeing under another split.
    stored_text = b"".join(map(rendered, stored[same:]))
    caller_text = b"".join(map(rendered, caller[same:]))
    common = common_prefix(stored_text, caller_text)
    stored_ends = list(accumulate(len(rendered(token)) for token in stored[same:]))
    caller_at = {end: count for count, end in enumerate(accumulate(len(rendered(t)) for t in caller[same:]), 1)}
    for count in range(len(stored_ends), 0, -1):
        end = stored_ends[count - 1]
        if end <= common and end in caller_at:
            return Seam(same + count, same + caller_at[end], True)
    return best


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
