"""What identifies the bytes of a model.

`safe`          SHA-256 of all files (of the digests, when there are several)
`gguf_chunked`  the same of each file's metadata and first tensor only
`fast_unsafe`   the caller's word; without one, a hash of path, size, times and inode

Digests are remembered under `<state_dir>/fingerprints/` by path, size, mtime, ctime and inode: a second load of a large file
costs nothing, and a changed file is noticed by its ctime, which no program can set.
"""

import contextlib
import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from barrel_inference.errors import BadModel

_CHUNK_BYTES = 4 << 20
# GGUF metadata value types and their sizes; 8 is a string, 9 an array.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_MAX_ITEMS = 1 << 24  # more keys, tensors or array items than any model has: the file is damaged
_MAX_DEPTH = 8  # of arrays within arrays


def fingerprint_of(
    files: Sequence[Path], mode: str, supplied: bytes | None, state_dir: Path,
    on_progress: Callable[[float], None] = lambda _fraction: None,
) -> bytes:  # fmt: skip
    """The model's 32 bytes.

    Args:
        on_progress: called with the fraction of the bytes that were read; of remembered files nothing is read.

    Raises:
        BadModel: a supplied fingerprint is not that of the files, or they cannot be read.
    """
    if mode == "fast_unsafe":
        return supplied or hashlib.sha256("\n".join(map(_identity, files)).encode()).digest()
    progress = _Progress(sum(file.stat().st_size for file in files), on_progress)
    read = progress.whole_digest if mode == "safe" else _chunk_digest
    digests = [_remembered(file, mode, read, state_dir) for file in files]
    found = digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()
    if supplied is not None and supplied != found:
        raise BadModel(
            f"the fingerprint of {str(files[0])!r} ({mode}) is {found.hex()}, and {supplied.hex()} was given",
            hint="the file is not the one that was meant; correct the fingerprint, or leave it out",
        )
    return found


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


@dataclass(slots=True)
class _Progress:
    """Reads files whole, and tells how far it is."""

    total_bytes: int
    tell: Callable[[float], None]
    done_bytes: int = 0

    def whole_digest(self, path: Path) -> bytes:
        """SHA-256 of a file's bytes."""
        digest = hashlib.sha256()
        buffer = bytearray(_CHUNK_BYTES)
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                self.done_bytes += count
                self.tell(min(1.0, self.done_bytes / self.total_bytes))
        return digest.digest()


def _identity(path: Path) -> str:
    stat = path.stat()
    return repr((os.fspath(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))


def _remembered(path: Path, mode: str, read: Callable[[Path], bytes], state_dir: Path) -> bytes:
    identity = _identity(path)
    name = hashlib.sha256(f"{mode}\n{identity}".encode("utf-8", "surrogateescape")).hexdigest()
    note = state_dir / "fingerprints" / name
    try:
        return _checked(note.read_text())
    except (OSError, ValueError):
        pass  # not there, or damaged: it is made anew
    try:
        digest = read(path)
    except (OSError, EOFError, ValueError) as bad:
        raise BadModel(f"{str(path)!r} cannot be fingerprinted: {bad}") from bad
    if _identity(path) != identity:
        raise BadModel(f"{str(path)!r} changed while it was read", hint="load it when it is complete")
    _remember(note, digest)
    return digest


def _checked(text: str) -> bytes:
    digest = bytes.fromhex(text)
    if len(digest) != 32:
        raise ValueError(f"{len(digest)} bytes")
    return digest


def _remember(note: Path, digest: bytes) -> None:
    """Keep a digest; a directory that cannot be written costs time at the next load, nothing else."""
    temporary = note.with_name(f"{note.name}.{os.getpid()}.tmp")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(digest.hex())
        temporary.replace(note)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _chunk_digest(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        end = min(_end_of_first_tensor(file, size), size)
        file.seek(0)
        digest = hashlib.sha256(struct.pack("<Q", size))
        while end and (chunk := file.read(min(end, _CHUNK_BYTES))):
            digest.update(chunk)
            end -= len(chunk)
        return digest.digest()


def _end_of_first_tensor(file: BinaryIO, size: int) -> int:
    """Where the first tensor's data end: header, metadata and tensor list lie before it."""
    _, version, n_tensors, n_keys = struct.unpack("<IIQQ", _take(file, 24))
    if version not in (2, 3) or n_tensors > _MAX_ITEMS or n_keys > _MAX_ITEMS:
        raise ValueError(f"GGUF version {version} with {n_tensors} tensors and {n_keys} keys is not supported")
    alignment = _DEFAULT_ALIGNMENT
    for _ in range(n_keys):
        key = _string(file)
        kind = _u32(file)
        if key == b"general.alignment" and kind == 4:
            alignment = _u32(file)
        else:
            _skip(file, kind)
    offsets = sorted(_tensor_offset(file) for _ in range(n_tensors))
    start = -(-file.tell() // max(alignment, 1)) * max(alignment, 1)
    return start + offsets[1] if len(offsets) > 1 else size


def _tensor_offset(file: BinaryIO) -> int:
    _string(file)
    _take(file, 8 * _u32(file) + 4)  # dimensions and type
    return int(struct.unpack("<Q", _take(file, 8))[0])


def _skip(file: BinaryIO, kind: int, depth: int = 0) -> None:
    if kind == _STRING:
        _string(file)
    elif kind == _ARRAY and depth < _MAX_DEPTH:
        item, count = struct.unpack("<IQ", _take(file, 12))
        if count > _MAX_ITEMS:
            raise ValueError(f"an array of {count} items")
        if item in _SIZES:
            file.seek(_SIZES[item] * count, os.SEEK_CUR)
        else:
            for _ in range(count):
                _skip(file, item, depth + 1)
    elif kind in _SIZES:
        _take(file, _SIZES[kind])
    else:
        raise ValueError(f"a value of unknown type {kind}")


def _string(file: BinaryIO) -> bytes:
    (length,) = struct.unpack("<Q", _take(file, 8))
    return _take(file, length)


def _u32(file: BinaryIO) -> int:
    return int(struct.unpack("<I", _take(file, 4))[0])


def _take(file: BinaryIO, count: int) -> bytes:
    if count > 1 << 28:
        raise ValueError(f"a text of {count} bytes")
    data = file.read(count)
    if len(data) != count:
        raise EOFError("the file ends in its metadata")
    return data
