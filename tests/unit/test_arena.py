"""The shared arena: handed out by descriptor, sealed, given back to the system."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from barrel_inference.tiers.arena import PAGE_BYTES, Arena, ArenaGone, Mapping, Mappings

T = TypeVar("T")
MIB = 1024 * 1024


def with_served(path: Path, work: Callable[[Arena], T]) -> T:
    """Run `work` in a thread while an arena of incarnation 7 is served at `path`."""

    async def serve() -> T:
        arena = Arena(4 * MIB)
        arena.serve(path, 7)
        try:
            return await asyncio.to_thread(work, arena)
        finally:
            arena.close()

    return asyncio.run(serve())


def test_both_sides_see_the_same_bytes(tmp_path: Path) -> None:
    """What one process writes into its mapping is what the owner reads, and the other way round."""

    def work(arena: Arena) -> None:
        offset = arena.allocate(1000)
        assert offset is not None
        mapping = Mapping.attach(tmp_path / "a", 7)
        mapping.prefault(offset, 1000)
        mapping.view(offset, 5)[:] = b"hello"
        assert bytes(arena.view(offset, 5)) == b"hello"
        arena.view(offset, 5)[:] = b"there"
        assert bytes(mapping.view(offset, 5)) == b"there"

    with_served(tmp_path / "a", work)


def test_another_incarnation_is_refused(tmp_path: Path) -> None:
    """A location of a dead owner is never read from its successor's arena."""

    def work(_arena: Arena) -> None:
        with pytest.raises(ArenaGone, match="incarnation 7 serves now, not 6"):
            Mapping.attach(tmp_path / "a", 6)

    with_served(tmp_path / "a", work)


def test_nobody_serves(tmp_path: Path) -> None:
    """Attaching where nobody listens fails at once, and a closed arena leaves no socket."""
    with_served(tmp_path / "a", lambda _arena: None)
    assert not (tmp_path / "a").exists()
    with pytest.raises(ArenaGone):
        Mapping.attach(tmp_path / "a", 7)


def test_arena_cannot_shrink_under_a_reader(tmp_path: Path) -> None:
    """The file is sealed: nobody who holds the descriptor can cut it."""
    arena = Arena(MIB)
    with pytest.raises(PermissionError):
        os.ftruncate(arena._descriptor, PAGE_BYTES)


def test_given_back_memory_leaves_the_process() -> None:
    """Freeing with `give_back` lowers the memory in use at once; without, it is kept warm."""
    arena = Arena(4 * MIB)
    offset = arena.allocate(2 * MIB)
    assert offset is not None
    arena.mapping.prefault(offset, 2 * MIB)
    arena.view(offset, 2 * MIB)[::PAGE_BYTES] = b"x" * (2 * MIB // PAGE_BYTES)
    arena.free(offset)
    assert arena.resident_bytes >= 2 * MIB
    offset = arena.allocate(2 * MIB)
    assert offset is not None
    arena.free(offset, give_back=True)
    assert arena.resident_bytes == 0


def test_small_neighbours_survive_a_give_back() -> None:
    """Giving back an image never touches the page that a neighbour shares with it."""
    arena = Arena(4 * MIB)
    offsets = [arena.allocate(1984) for _ in range(9)]
    for number, offset in enumerate(offsets):
        assert offset is not None
        arena.view(offset, 1984)[:] = bytes([number]) * 1984
    for offset in offsets[::2]:
        assert offset is not None
        arena.free(offset, give_back=True)
    for number in range(1, 9, 2):
        offset = offsets[number]
        assert offset is not None
        assert bytes(arena.view(offset, 1984)) == bytes([number]) * 1984


def test_fragmentation_does_not_refuse() -> None:
    """With every other small slab freed, one large slab of the freed bytes still fits, within the memory of the capacity."""
    arena = Arena(4 * MIB)
    offsets = [arena.allocate(64 * 1024) for _ in range(64)]
    for offset in offsets:
        assert offset is not None
        arena.mapping.prefault(offset, 64 * 1024)
    for offset in offsets[::2]:
        assert offset is not None
        arena.free(offset)
    large = arena.allocate(2 * MIB)
    assert large is not None
    arena.mapping.prefault(large, 2 * MIB)
    assert arena.resident_bytes <= 4 * MIB


def test_close_leaves_live_views_alone() -> None:
    """A view that was taken before `close` stays readable; a new one is refused."""
    arena = Arena(MIB)
    view = arena.view(0, 5)
    view[:] = b"hello"
    mapping = arena.mapping
    arena.close()
    assert bytes(view) == b"hello"
    with pytest.raises(ArenaGone):
        mapping.view(0, 5)


def test_mappings_are_shared_and_dropped(tmp_path: Path) -> None:
    """One mapping per incarnation; after `drop` it is not handed out again."""

    def work(_arena: Arena) -> None:
        mappings = Mappings(tmp_path)
        first = mappings.get("tier:ram", 7)
        assert mappings.get("tier:ram", 7) is first
        mappings.drop("tier:ram", 7)
        with pytest.raises(ArenaGone):
            mappings.get("tier:ram", 7)
        mappings.close()

    with_served(tmp_path / "tier:ram.arena", work)


def test_view_beyond_the_arena_is_refused() -> None:
    """A location that no arena of this size can have is an error, not a short view."""
    arena = Arena(MIB)
    with pytest.raises(ArenaGone):
        arena.view(arena.mapping.size_bytes - 10, 11)
    with pytest.raises(ArenaGone):
        arena.view(-1, 5)
