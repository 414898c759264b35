"""The runtime directory: one supervisor at a time, no leftovers."""

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from barrel_inference.errors import InvalidArgument
from barrel_inference.transport import make_private_dir


def claim(path: Path, option: str) -> int:
    """Make the directory ours alone; the claim lasts as long as the returned descriptor, so it ends with the process.

    The lock is on the directory itself: a lock file would have to be left behind, or be removed under somebody's hands.
    """
    while True:
        make_private_dir(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise InvalidArgument(
                f"{option} {str(path)!r} is in use by another runtime",
                hint=f"stop that one (barrelctl stop), or choose another {option}",
            ) from None
        except FileNotFoundError:
            pass  # its last owner removed it between our open and our lock
        os.close(descriptor)


def sweep(path: Path) -> None:
    """Remove what a runtime leaves when it is killed: sockets, arenas and black boxes."""
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode) or entry.name.endswith((".arena", ".box")):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)


def remove_child_files(path: Path, child_id: str) -> None:
    """Remove what a child that is gone had here."""
    for name in (child_id, f"{child_id}.arena", f"{child_id}.box"):
        with contextlib.suppress(FileNotFoundError):
            (path / name).unlink()


def leave(path: Path) -> None:
    """Remove what is left, and the directory if it is empty; systemd removes its own."""
    sweep(path)
    if os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0] != str(path):
        with contextlib.suppress(OSError):  # not empty, or the parent is not ours to change
            path.rmdir()
