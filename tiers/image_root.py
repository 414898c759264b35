"""The directory of a file tier: opened once, locked, made when it is missing, looked through.

The lock keeps two tiers from one root: a quota is one tier's, and each would delete the other's files.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from barrel_inference.errors import TierUnavailable
from barrel_inference.tiers import files, names

# Leftovers of a writer that nobody saw die (another host's, or its number is in use again) go after this time.
TEMP_TTL_S = 600.0
# A tier that was killed lets go of its lock at once; one that drains may take a moment.
LOCK_WAIT_S = 10.0
_LOCK_NAME = ".lock"
_SHARDS = [f"{number:02x}" for number in range(256)]


class ImageRoot:
    """An open and locked root.

    Raises:
        TierUnavailable: it cannot be made or used, or another runtime has it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._root, self._lock = self._acquire()

    def close(self) -> None:
        """Let go of it, for the next."""
        os.close(self._lock)
        os.close(self._root)

    def remove_if_empty(self) -> None:
        """Leave nothing behind where there is nothing to keep; to be closed afterwards."""
        for shard in _SHARDS:
            with contextlib.suppress(OSError):
                os.rmdir(shard, dir_fd=self._root)
        with contextlib.suppress(OSError):
            if os.listdir(self._root) == [_LOCK_NAME]:
                os.unlink(_LOCK_NAME, dir_fd=self._root)
                os.rmdir(self.path)

    @contextlib.contextmanager
    def shard(self, shard: str) -> Iterator[int]:
        """One directory below it."""
        with files.open_shard(self._root, shard) as directory:
            yield directory

    @contextlib.contextmanager
    def directory_of(self, name: str) -> Iterator[tuple[int, str]]:
        """The directory of a file, and its name there."""
        shard, _, base = name.partition("/")
        with files.open_shard(self._root, shard) as directory:
            yield directory, base

    def can_write(self) -> bool:
        """Does the file system take anything from us?"""
        return os.access(".", os.W_OK, dir_fd=self._root) and not os.fstatvfs(self._root).f_flag & os.ST_RDONLY

    def free_bytes(self) -> int:
        """What the file system still has for us."""
        found = os.fstatvfs(self._root)
        return found.f_bavail * found.f_frsize

    def make_ready(self, shard: str) -> bool:
        """Make a directory below it if it is missing; False = nothing can be written there."""
        for attempt in range(2):
            try:
                with files.open_shard(self._root, shard, create=True) as directory:
                    return os.access(".", os.W_OK, dir_fd=directory)
            except OSError:
                if attempt == 0:
                    self.reopen_if_replaced()
        return False

    def reopen_if_replaced(self) -> None:
        """Somebody removed the root, or put another in its place: go on with what has its name now."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path), os.fstat(self._root)):
                return
        with contextlib.suppress(TierUnavailable):
            root, lock = self._acquire()
            self.close()
            self._root, self._lock = root, lock

    def listed(
        self,
        now_unix_s: float | None = None,
        dead_pids: frozenset[int] = frozenset(),
        live_pids: frozenset[int] = frozenset(),
    ) -> Iterator[tuple[str, int]]:
        """Complete files and their sizes; leftovers that nobody can be writing any more are removed on the way."""
        now_unix_s = time.time() if now_unix_s is None else now_unix_s
        for shard in _SHARDS:
            with (
                contextlib.suppress(OSError),
                self.shard(shard) as directory,
                os.scandir(directory) as entries,
            ):
                for entry in entries:
                    found = names.parse(shard, entry.name)
                    if found is None:
                        continue
                    with contextlib.suppress(OSError):  # it went meanwhile, or cannot be removed
                        state = entry.stat(follow_symlinks=False)
                        if found.writer_pid is None:
                            yield f"{shard}/{entry.name}", state.st_size
                        elif found.writer_pid in dead_pids or (
                            found.writer_pid not in live_pids
                            and (now_unix_s - state.st_mtime > TEMP_TTL_S or not _is_alive(found.writer_pid))
                        ):
                            os.unlink(entry.name, dir_fd=directory)

    def _acquire(self) -> tuple[int, int]:
        """Root and lock, of the directory that has the name now: the one before may have been removed while we waited."""
        while True:
            root = self._open()
            try:
                lock = self._take_lock(root)
            except TierUnavailable:
                os.close(root)
                raise
            if self._is_current(root, lock):
                return root, lock
            os.close(lock)
            os.close(root)

    def _is_current(self, root: int, lock: int) -> bool:
        opened, locked = os.fstat(root), os.fstat(lock)
        try:
            if not os.path.samestat(os.stat(self.path), opened):
                return False
            # On a read-only file system the root stands for the lock.
            return os.path.samestat(locked, opened) or os.path.samestat(os.stat(_LOCK_NAME, dir_fd=root), locked)
        except FileNotFoundError:
            return False

    def _open(self) -> int:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A link is its owner's choice; in /dev/shm it could be anybody's.
            is_strange = self.path.lstat().st_uid not in (0, os.getuid())
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise TierUnavailable(
                f"tier root {str(self.path)!r} cannot be used ({error.strerror})", hint="choose another root"
            ) from error
        if is_strange or os.fstat(descriptor).st_uid != os.getuid():
            os.close(descriptor)
            raise TierUnavailable(f"tier root {str(self.path)!r} belongs to another user", hint="choose another root")
        return descriptor

    def _take_lock(self, root: int) -> int:
        """The lock's descriptor, once whoever held it before let go."""
        # For reading: a file that is open for writing keeps an administrator from remounting the file system read-only.
        flags = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(_LOCK_NAME, flags, 0o600, dir_fd=root)
        except OSError:
            return os.dup(root)  # read-only: nobody writes there, nobody has to be kept out
        give_up_s = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() > give_up_s:
                    os.close(descriptor)
                    raise TierUnavailable(
                        f"tier root {str(self.path)!r} is in use by another runtime", hint="choose another root"
                    ) from None
                time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
