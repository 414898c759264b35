"""Cutting saves into nodes, and the seam of a restore (workers/model/chain.py)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barrel_inference.workers.model.chain import Seam, common_prefix, cut_points, find_seam

PIECES = {1: b"a", 2: b"b", 3: b"ab", 4: b"abc", 5: b"c", 6: b"bc"}


@pytest.mark.parametrize(
    ("start", "end", "extra", "ranges"),
    [
        (0, 600, (), [(0, 256), (256, 512), (512, 600)]),
        (300, 700, (), [(300, 512), (512, 700)]),
        (256, 512, (), [(256, 512)]),
        (0, 100, (99,), [(0, 99), (99, 100)]),
        (0, 100, (0, 100, 200), [(0, 100)]),
        (10, 10, (), []),
    ],
)
def test_cut_points(start: int, end: int, extra: tuple[int, ...], ranges: list[tuple[int, int]]) -> None:
    """Nodes start where the parent ends, and never cross a multiple of the block."""
    assert cut_points(start, end, 256, extra) == ranges


@pytest.mark.parametrize(
    ("stored", "caller", "seam"),
    [
        ([1, 2, 5], [1, 2, 5, 1], Seam(3, 3, False)),
        ([1, 2], [3], Seam(2, 1, True)),  # a|b against ab
        ([3, 5], [1, 6], Seam(2, 2, True)),  # ab|c against a|bc: only the end is a boundary of both
        ([4], [3], Seam(0, 0, False)),  # abc against ab: no common boundary
        ([1, 3], [1, 2], Seam(1, 1, False)),
        ([], [1], Seam(0, 0, False)),
    ],
)
def test_seam(stored: list[int], caller: list[int], seam: Seam) -> None:
    """The seam is the last point that is a token boundary on both sides."""
    assert find_seam(stored, caller, PIECES.__getitem__) == seam


@given(st.lists(st.sampled_from(sorted(PIECES))), st.lists(st.sampled_from(sorted(PIECES))))
def test_seam_property(stored: list[int], caller: list[int]) -> None:
    """What lies before the seam has equal bytes on both sides, whatever the tokens are."""
    seam = find_seam(stored, caller, PIECES.__getitem__)
    left = b"".join(PIECES[t] for t in stored[: seam.stored_tokens])
    assert left == b"".join(PIECES[t] for t in caller[: seam.caller_tokens])
    assert seam.stored_tokens >= common_prefix(stored, caller)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    """The halving search finds the same length as a plain loop."""
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(a, b) == expected
