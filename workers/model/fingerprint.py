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
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from barrel_inference.errors import BadModel
from barrel_inference.workers.model.gguf_header import read_header

_CHUNK_BYTES = 4 << 20
_NICEST = 19


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


class Hashing:
    """A fingerprint in the making, on a thread of its own: the weights are loaded meanwhile.

    At the lowest priority, so that a model that answers beside it keeps its cores.
    """

    def __init__(
        self, files: Sequence[Path], mode: str, supplied: bytes | None, state_dir: Path,
        on_progress: Callable[[float], None],
    ) -> None:  # fmt: skip
        self._found: Future[bytes] = Future()
        self._abandoned = False

        def tell(fraction: float) -> None:
            if self._abandoned:
                raise _Abandoned
            on_progress(fraction)

        def work() -> None:
            with contextlib.suppress(OSError):  # a sandbox may forbid it; then it is only less polite
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICEST)
            try:
                self._found.set_result(fingerprint_of(files, mode, supplied, state_dir, tell))
            except BaseException as failed:  # whoever waits for the result gets it
                self._found.set_exception(failed)

        threading.Thread(target=work, name="hashing", daemon=True).start()

    def result(self) -> bytes:
        """Wait for it; raises as `fingerprint_of`."""
        return self._found.result()

    def abandon(self) -> None:
        """Nobody needs it any more: the load has failed."""
        self._abandoned = True


class _Abandoned(Exception):
    """The load that wanted this fingerprint has failed."""


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
        with temporary.open("x") as file:  # a new file, whatever link has its name
            file.write(digest.hex())
        temporary.replace(note)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _chunk_digest(path: Path) -> bytes:
    header = read_header(path)
    left = min(header.first_tensor_end, header.size_bytes)
    with path.open("rb") as file:
        digest = hashlib.sha256(struct.pack("<Q", header.size_bytes))
        while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
        return digest.digest()
