"""The model's reader: verified bytes or an error, from memory and from files."""

import asyncio
import ctypes
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from barrel_inference.protocol import Location
from barrel_inference.tiers import kvc, names
from barrel_inference.tiers.arena import PAGE_BYTES, Arena
from barrel_inference.tiers.kvc import CorruptImage
from barrel_inference.workers.model.images import ImageReader, WarmBuffers
from tests.unit.test_kvc import KEY, META, sealed


def in_arena(tmp_path: Path, work: Callable[[Arena, ImageReader, Location], None]) -> None:
    """Run `work` beside an owner whose arena holds one image."""

    async def serve() -> None:
        arena = Arena(1 << 20)
        image = sealed(META, b"cells", b"state")
        offset = arena.allocate(len(image))
        assert offset is not None
        arena.view(offset, len(image))[:] = image
        arena.serve(tmp_path / "tier:ram.arena", 7)
        reader = ImageReader(tmp_path)
        try:
            await asyncio.to_thread(work, arena, reader, Location("tier:ram", 7, len(image), offset))
        finally:
            reader.close()
            arena.close()

    asyncio.run(serve())


def test_slab_is_opened_in_place(tmp_path: Path) -> None:
    """An image in an arena comes back whole, and intact as long as nobody frees it."""

    def work(_arena: Arena, reader: ImageReader, location: Location) -> None:
        opened = reader.open(location, KEY, "")
        assert (opened.image.meta, bytes(opened.image.cells), bytes(opened.image.snapshot)) == (
            META,
            b"cells",
            b"state",
        )
        assert opened.is_intact()

    in_arena(tmp_path, work)


def test_slab_that_is_freed_meanwhile_is_not_intact(tmp_path: Path) -> None:
    """A reader that was overtaken by an eviction learns it, even if the same key is saved there again."""

    def work(arena: Arena, reader: ImageReader, location: Location) -> None:
        opened = reader.open(location, KEY, "")
        kvc.invalidate(arena.view(location.offset, location.size_bytes))
        assert not opened.is_intact()
        again = sealed(replace(META, created_unix_s=META.created_unix_s + 1), b"cells", b"state")
        arena.view(location.offset, location.size_bytes)[:] = again
        assert not opened.is_intact()

    in_arena(tmp_path, work)


def test_arena_of_another_life_is_an_error(tmp_path: Path) -> None:
    """A location of an incarnation that is gone is not read from the present one."""

    def work(_arena: Arena, reader: ImageReader, location: Location) -> None:
        with pytest.raises(OSError, match="incarnation 7 serves now, not 6"):
            reader.open(Location("tier:ram", 6, location.size_bytes, location.offset), KEY, "")

    in_arena(tmp_path, work)


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, Location]:
    """A file with one image, and where it is."""
    path = tmp_path / names.file_name(KEY)
    path.parent.mkdir()
    path.write_bytes(sealed(META, b"cells" * 1000))
    return path, Location("tier:disk", 1, path.stat().st_size, 0, names.file_name(KEY))


def test_file_is_opened(tmp_path: Path, stored: tuple[Path, Location]) -> None:
    """An image in a file comes back whole, and stays so whatever happens to the file."""
    path, location = stored
    opened = ImageReader(tmp_path).open(location, KEY, str(tmp_path))
    os.truncate(path, 0)
    assert bytes(opened.image.cells) == b"cells" * 1000
    assert opened.is_intact()


@pytest.mark.parametrize("at", [0, 9, 40, 150, 165, 250, 3000])
def test_flipped_byte_is_an_error(tmp_path: Path, stored: tuple[Path, Location], at: int) -> None:
    """A damaged file is never imported."""
    path, location = stored
    image = bytearray(path.read_bytes())
    image[at] ^= 1
    path.write_bytes(image)
    with pytest.raises(CorruptImage):
        ImageReader(tmp_path).open(location, KEY, str(tmp_path))


def test_cut_or_missing_file_is_an_error(tmp_path: Path, stored: tuple[Path, Location]) -> None:
    """A file of another length is corrupt, one that is gone is not found."""
    path, location = stored
    reader = ImageReader(tmp_path)
    os.truncate(path, 100)
    with pytest.raises(CorruptImage):
        reader.open(location, KEY, str(tmp_path))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        reader.open(location, KEY, str(tmp_path))


def test_name_of_another_key_is_refused(tmp_path: Path, stored: tuple[Path, Location]) -> None:
    """A location cannot lead out of the root, or to another key's file."""
    with pytest.raises(CorruptImage):
        ImageReader(tmp_path).open(replace_name(stored[1], "../secret"), KEY, str(tmp_path))


def replace_name(location: Location, name: str) -> Location:
    """The same location with another name."""
    return Location(location.server, location.incarnation, location.size_bytes, 0, name)


def test_buffer_in_use_is_not_reused() -> None:
    """A warm buffer is handed out again only when the last slice of it is gone."""
    buffers = WarmBuffers(keep_bytes=10_000)
    first = buffers.take(1000)
    part = first[10:20]
    first[:] = b"a" * 1000
    del first
    second = buffers.take(1000)
    second[:] = b"b" * 1000
    assert bytes(part) == b"a" * 10
    del part
    third = buffers.take(500)
    assert bytes(third) == b"a" * 500  # the first one's memory
    assert bytes(second) == b"b" * 1000


def test_few_buffers_are_kept() -> None:
    """Memory beyond the limit is let go of with its view."""
    buffers = WarmBuffers(keep_bytes=1000)
    views = [buffers.take(400) for _ in range(4)]
    assert sum(len(buffer) for buffer in buffers._buffers) == 800
    del views
    large = buffers.take(900)
    assert sum(len(buffer) for buffer in buffers._buffers) == len(large)


def test_warm_buffers_are_there_before_the_first_read() -> None:
    """Warming fills the room with buffers of the size that is read; reading takes one of them, and makes none."""
    buffers = WarmBuffers(keep_bytes=10_000)
    buffers.warm(3_000)
    assert [len(buffer) for buffer in buffers._buffers] == [3_000] * 3
    held = [buffers.take(2_900) for _ in range(3)]
    assert [len(buffer) for buffer in buffers._buffers] == [3_000] * 3
    assert len({id(view.obj) for view in held}) == 3


def test_files_are_read_to_where_a_page_begins() -> None:
    """Elsewhere the kernel copies at a fraction of its speed; made new, kept warm, or used again."""
    buffers = WarmBuffers(keep_bytes=20_000)
    buffers.warm(9_000)
    for size_bytes in (9_000, 100, 15_000):
        view = buffers.take(size_bytes)
        assert (len(view), ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE_BYTES) == (size_bytes, 0)
