"""A log file that bounds itself: written line by line, set aside when it has grown too long, one old one kept."""

import contextlib
import errno
import os
import stat
import threading
from pathlib import Path

# Two such files for each process at most.
LOG_BYTES = 32 * 1024 * 1024


def open_log(path: Path) -> int:
    """A descriptor to append to the file by; one that has grown too long is set aside first."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > LOG_BYTES:
            _set_aside(path)
    return _opened(path)


class Lines:
    """Writes lines to a descriptor, from any thread, each in one piece.

    A disk that is full costs lines, never the process that writes them.
    """

    def __init__(self, descriptor: int, limit_bytes: int = LOG_BYTES) -> None:
        self._descriptor = descriptor
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()

    def write(self, line: str) -> None:
        """Append one line."""
        with self._lock, contextlib.suppress(OSError):
            os.write(self._descriptor, line.encode("utf-8", "backslashreplace") + b"\n")
            self._begin_anew_if_long()

    def _begin_anew_if_long(self) -> None:
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size <= self._limit_bytes:
            return
        path = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
        if path.suffix != ".log" or not os.path.samestat(found, path.stat()):
            return  # somebody else's file, or moved already
        _set_aside(path)
        fresh = _opened(path)
        # What others in this process write to the same file (llama.cpp, a traceback) follows.
        for descriptor in {self._descriptor, 1, 2}:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), found):
                    os.dup2(fresh, descriptor, inheritable=descriptor <= 2)
        os.close(fresh)


def _opened(path: Path) -> int:
    """Never through a link: one in the file's place is removed."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    path.unlink()
    return os.open(path, flags, 0o600)


def _set_aside(path: Path) -> None:
    path.rename(path.with_suffix(".log.old"))
