"""The arena's allocator: no overlap, no byte over the capacity, warm memory first."""

from hypothesis import given, settings
from hypothesis import strategies as st

from barrel_inference.tiers.extents import Extents, Range


def test_freed_memory_is_reused_warm() -> None:
    """An allocation that fits into freed memory goes there, and costs no give-back."""
    extents = Extents(4096, 65536)
    first = extents.allocate(1024)
    second = extents.allocate(1024)
    assert first is not None
    assert second is not None
    assert extents.free(first.offset, give_back=False) is None
    assert extents.allocate(512) == (first.offset, [])
    assert extents.warm_bytes == 512


def test_warm_memory_makes_way() -> None:
    """When allocated and warm bytes would exceed the capacity, warm ranges are given back."""
    extents = Extents(4096, 65536)
    places = [extents.allocate(1024) for _ in range(4)]
    for place in places[::2]:
        assert place is not None
        extents.free(place.offset, give_back=False)
    got = extents.allocate(2048)  # fits in neither hole
    assert got is not None
    assert got.offset == 4096
    assert sum(end - start for start, end in got.punch) == 2048
    extents.check()


def test_full_is_none() -> None:
    """The capacity is exact, to the byte."""
    extents = Extents(1024, 65536)
    assert extents.allocate(1088) is None
    assert extents.allocate(1024) is not None
    assert extents.allocate(64) is None


def test_smaller_capacity() -> None:
    """Warm memory above a smaller capacity is given back at once, what is allocated there when it is freed."""
    extents = Extents(4096, 65536)
    places = [extents.allocate(1024) for _ in range(4)]
    offsets = [place.offset for place in places if place is not None]
    extents.free(offsets[3], give_back=False)
    assert extents.resize(2048) == [Range(3072, 4096)]
    assert extents.allocate(64) is None
    assert extents.free(offsets[0], give_back=False) == Range(0, 1024)
    assert extents.free(offsets[1], give_back=False) is None
    extents.check()
    assert extents.resize(4096) == []
    assert [extents.allocate(1024) is not None for _ in range(4)] == [True, True, True, False]
    extents.check()


def test_given_back_memory_is_named() -> None:
    """A free that gives back returns its range, and the free range around it."""
    extents = Extents(4096, 65536)
    first = extents.allocate(1000)
    assert first is not None
    assert extents.free(first.offset, give_back=True) == Range(0, 1024)
    assert extents.free_around(0, 1024) == Range(0, 65536)


@given(steps=st.lists(st.tuples(st.integers(0, 5000), st.booleans(), st.integers(0, 50)), max_size=120))
@settings(max_examples=150, deadline=None)
def test_invariants_hold(steps: list[tuple[int, bool, int]]) -> None:
    """Whatever is allocated and freed: nothing overlaps, and the capacity is used up to its last byte or refused."""
    extents = Extents(16384, 16384 * 16)
    held: list[int] = []
    for size_bytes, give_back, pick in steps:
        if held and pick % 3 == 0:
            extents.free(held.pop(pick % len(held)), give_back=give_back)
        else:
            need_bytes = max(64, -(-size_bytes // 64) * 64)
            fits = extents.allocated_bytes + need_bytes <= 16384
            place = extents.allocate(size_bytes)
            assert (place is not None) == fits
            if place is not None:
                held.append(place.offset)
        extents.check()
