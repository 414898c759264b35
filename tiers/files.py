"""How every process touches image files: relative to an open directory, never through a link, read before it is trusted.

A file is read with `pread` into memory of our own and verified there. It is never mapped: a file that is truncated under a
mapping kills the process that reads it.
"""

import contextlib
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from barrel_inference.protocol import Location, StoredRow
from barrel_inference.tiers import kvc
from barrel_inference.tiers.kvc import CorruptImage

# Header and metadata of an ordinary node (256 tokens: 2 KiB of numbers, about 1 KiB of text) in one read.
_PREFIX_BYTES = 8192


@contextlib.contextmanager
def open_root(root: str | Path) -> Iterator[int]:
    """The root directory; the root itself may be a link, its owner chose it."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def open_shard(root: int, shard: str, *, create: bool = False) -> Iterator[int]:
    """One directory below the root; a link in its place is `OSError`."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(shard, flags, dir_fd=root)
    except FileNotFoundError:
        if not create:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(shard, 0o700, dir_fd=root)
            os.fsync(root)  # a row must not vanish with the directory that was made for it
        descriptor = os.open(shard, flags, dir_fd=root)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def open_regular(directory: int, base: str, flags: int = os.O_RDONLY) -> Iterator[tuple[int, int]]:
    """A regular file and its size; `CorruptImage` when something else has the name.

    Not blocking: a FIFO in a file's place must not stop us.
    """
    try:
        descriptor = os.open(base, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        found = os.stat(base, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISREG(found.st_mode):
            raise
        raise CorruptImage("not a regular file") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CorruptImage("not a regular file")
        yield descriptor, found.st_size
    finally:
        os.close(descriptor)


def remove(directory: int, base: str) -> None:
    """Take away what has this name: a file, a link, or a directory if it is empty; raises `OSError`."""
    try:
        os.unlink(base, dir_fd=directory)
    except IsADirectoryError:
        os.rmdir(base, dir_fd=directory)


def page_aligned(size_bytes: int) -> mmap.mmap:
    """Memory to read a file into.

    It begins with a page, as a file's pages do: a `bytearray` begins 16 bytes later, and there AMD's processors copy (`rep
    movsb`, in the kernel) at a quarter of the speed (https://lunnova.dev/articles/ryzen-slow-short-rep-mov/).
    """
    memory = mmap.mmap(-1, max(1, size_bytes))
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def read_into(descriptor: int, target: memoryview) -> None:
    """Fill `target` from the file's start, or raise `CorruptImage` when the file ends early."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], done)
        if count == 0:
            raise CorruptImage(f"file ends after {done} of {len(target)} bytes")
        done += count


def read_row(directory: int, base: str, key: bytes, location: Location) -> StoredRow:
    """One file's row, from its header and trailer; the location gets the file's real size.

    Raises:
        CorruptImage: damaged, or not this key's.
        OSError: cannot be read at all.
    """
    with open_regular(directory, base) as (descriptor, file_bytes):
        prefix = os.pread(descriptor, _PREFIX_BYTES, 0)
        need_bytes = kvc.prefix_bytes(prefix)
        if need_bytes > len(prefix):
            prefix = os.pread(descriptor, need_bytes, 0)
        trailer = os.pread(descriptor, kvc.TRAILER_BYTES, max(0, file_bytes - kvc.TRAILER_BYTES))
    meta, layout, state = kvc.read_meta(prefix, file_bytes, trailer)
    if meta.key != key:
        raise CorruptImage("another key")
    return stored_row(meta, state, Location(location.server, location.incarnation, layout.size_bytes, 0, location.name))


def read_verified(directory: int, base: str, key: bytes) -> kvc.Meta:
    """The metadata of a file after checking every byte of it; raises as `read_row` does."""
    with open_regular(directory, base) as (descriptor, file_bytes):
        _sane(descriptor, file_bytes)
        whole = memoryview(page_aligned(file_bytes))[:file_bytes]
        read_into(descriptor, whole)
    return kvc.open_image(whole, key).meta


def stored_row(meta: kvc.Meta, state: kvc.Trailer, location: Location) -> StoredRow:
    """A row as it travels to the index."""
    return StoredRow(
        namespace=meta.namespace, model_id=meta.model_id, key=meta.key, parent_key=meta.parent_key,
        start_tokens=meta.start_tokens, token_ids=meta.token_ids, token_bytes=meta.token_bytes, text=meta.text,
        reason=meta.reason, snapshot=meta.snapshot, created_unix_s=meta.created_unix_s,
        last_used_unix_s=state.last_used_unix_s, hits=state.hits, marks=[(mark.key, mark.tokens, mark.reason, mark.pinned) for mark in state.marks],
        pinned=state.pinned, location=location,
    )  # fmt: skip


def _sane(descriptor: int, file_bytes: int) -> None:
    """Refuse a file whose header says another size, before its size is allocated."""
    if kvc.trailer_offset(os.pread(descriptor, kvc.HEADER_BYTES, 0)) + kvc.TRAILER_BYTES != file_bytes:
        raise CorruptImage(f"{file_bytes} bytes, the header says otherwise")
