"""A model's black box: which requests it was computing, to be read after it was killed.

A small file in the runtime directory that the model and the router both map. The model notes a request before it touches
anything for it, and takes the note back when the request waits or has ended; memory of a shared mapping outlives the process.
So a request that merely waited in a model that died is not taken for the cause.
"""

import contextlib
import hashlib
import mmap
import os
import threading
from pathlib import Path

RECORD_BYTES = 16
# 254 sequences, and as many requests again that are being tokenised.
RECORDS = 512
_FREE = bytes(RECORD_BYTES)


def path_of(runtime_dir: Path, process_id: str) -> Path:
    """Where the black box of a process lies; the supervisor removes it with the process's sockets."""
    return runtime_dir / f"{process_id}.box"


class Recorder:
    """The model's side; any thread may note. A note that finds no room, or no file, is left out."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._slots: dict[str, int] = {}
        self._unused = list(range(RECORDS))
        self._map: mmap.mmap | None = None
        with contextlib.suppress(OSError):  # a full file system: the router then takes every request for a suspect
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                # Reserved, or writing through the mapping would be a signal when the file system is full.
                os.posix_fallocate(descriptor, 0, RECORDS * RECORD_BYTES)
                self._map = mmap.mmap(descriptor, RECORDS * RECORD_BYTES)
            finally:
                os.close(descriptor)

    def computes(self, request_id: str) -> None:
        """From now on this request may be the one that kills us."""
        with self._lock:
            if self._map is None or request_id in self._slots or not self._unused:
                return
            slot = self._slots[request_id] = self._unused.pop()
            self._map[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = _digest(request_id)

    def rests(self, request_id: str) -> None:
        """It waits, or has ended."""
        with self._lock:
            slot = self._slots.pop(request_id, None)
            if slot is not None and self._map is not None:
                self._map[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = _FREE
                self._unused.append(slot)


class Reading:
    """The router's side: opened while the model lives, asked when it is dead."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError` when there is no black box, `ValueError` when it is none."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(descriptor, RECORDS * RECORD_BYTES, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)

    def computing(self) -> frozenset[bytes]:
        """What was being computed; ask it with `names`."""
        records = (self._map[at : at + RECORD_BYTES] for at in range(0, RECORDS * RECORD_BYTES, RECORD_BYTES))
        return frozenset(record for record in records if record != _FREE)

    def close(self) -> None:
        """Let go of it."""
        self._map.close()


def names(computing: frozenset[bytes], request_id: str) -> bool:
    """Is this request among those?"""
    return _digest(request_id) in computing


def _digest(request_id: str) -> bytes:
    return hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).digest()[:RECORD_BYTES]
