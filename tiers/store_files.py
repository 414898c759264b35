"""The images of the file tiers: one file each below a root on tmpfs (`ram_file`) or on disk.

A file gets its final name in one step, by link(2), after its bytes are on the medium; so whatever has such a name is complete,
and everything else is a leftover with a name that says whose. Trailers are rewritten in place, all other bytes never.

The root is locked: a quota is one tier's, and two of them would delete each other's files.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from barrel_inference.errors import TierUnavailable
from barrel_inference.protocol import Location, Roomed, StoredRow, Tier, Touch
from barrel_inference.tiers import files, kvc, names
from barrel_inference.tiers.headroom import MEMORY_SHARE, RESERVE_BYTES
from barrel_inference.tiers.kvc import CorruptImage
from barrel_inference.tiers.leases import Lease, Leases, Owner
from barrel_inference.tiers.store import Scan, Stats, Want

# Leftovers of a writer that nobody saw die (another host's, or its number is in use again) go after this time.
TEMP_TTL_S = 600.0
# A tier that was killed lets go of its lock at once; one that drains may take a moment.
LOCK_WAIT_S = 10.0
_LOCK_NAME = ".lock"
_SHARDS = [f"{number:02x}" for number in range(256)]


class FileStore:
    """A `Store` in a directory; places are paths below the root.

    `free_memory` is asked when files take memory (tmpfs); on a disk it is None.
    """

    def __init__(
        self, kind: Tier, server: str, incarnation: int, quota_bytes: int, root: Path,
        free_memory: Callable[[], int] | None,
    ) -> None:  # fmt: skip
        self.kind = kind
        self.root = root
        self.leases: Leases[str] = Leases()
        self._server = server
        self._incarnation = incarnation
        self._free_memory = free_memory
        self._sizes: dict[str, int] = {}
        self._stored_bytes = 0
        self._touched: dict[str, Touch] = {}
        self._stuck: set[str] = set()  # files that should be gone and could not be removed
        self._root = self._open()
        self._lock = self._take_lock(self._root)
        for name, size_bytes in self._listed():
            self._add(name, size_bytes)
        self.quota_bytes, self.note = self._usable(quota_bytes)

    # --- places

    def room(self, owner: Owner, deletes: Sequence[Location], wants: Sequence[Want], *, give_back: bool) -> Roomed:
        """See `Store.room`; files always give back."""
        freed = sum(self.delete(location) for location in deletes)
        locations: list[Location | None] = []
        # Of the places that are leased, some bytes may be in the file system already: this counts them twice, never not.
        spare_bytes = (
            min(self._spare_bytes() - self.leases.bytes, self.quota_bytes - self._used_bytes()) if wants else 0
        )
        for want in wants:
            if want.size_bytes > spare_bytes or not self._shard_ready(names.shard_of(want.key)):
                locations.append(None)
                continue
            spare_bytes -= want.size_bytes
            name = names.file_name(want.key)
            location = Location(self._server, self._incarnation, want.size_bytes, 0, name)
            self.leases.add(name, Lease(owner, want.key, location))
            locations.append(location)
        return Roomed(locations=locations, freed_bytes=freed)

    def committed(self, location: Location) -> Scan:
        """See `Store.committed`."""
        lease = self.leases.end(location.name)
        found = self._adopt(location.name, verify=False)
        if lease is not None and not lease.inherited:
            return found._replace(rows=())
        return found

    def free(self, locations: Sequence[Location]) -> Scan:
        """See `Store.free`."""
        ended = [one.name for one in locations if self.leases.end(one.name) is not None]
        return _merged(self._adopt(name, verify=True) for name in ended if name not in self._sizes)

    def delete(self, location: Location) -> int:
        """See `Store.delete`."""
        if names.key_of(location.name) is None:
            return 0
        size_bytes = self._sizes.get(location.name, 0)
        return size_bytes if self._unlink(location.name) else 0

    def hand_over(self) -> None:
        """See `Store.hand_over`."""
        for name in self.leases.hand_over():
            self.leases.end(name)

    # --- trailers

    def touch(self, touch: Touch) -> None:
        """See `Store.touch`."""
        if touch.location.name in self._sizes:
            self._touched[touch.location.name] = touch

    def flush(self) -> None:
        """See `Store.flush`. What cannot be written is let go: recency is not worth a failure."""
        touched, self._touched = self._touched, {}
        for name, touch in touched.items():
            packed = kvc.pack_trailer(
                kvc.Trailer(touch.last_used_unix_s, touch.hits, touch.pinned, kvc.marks_of(touch.marks))
            )
            with (
                contextlib.suppress(OSError, CorruptImage),
                self._directory_of(name) as (directory, base),
                files.open_regular(directory, base, os.O_WRONLY) as (descriptor, file_bytes),
            ):
                if file_bytes == self._sizes.get(name):
                    os.pwrite(descriptor, packed, file_bytes - kvc.TRAILER_BYTES)

    # --- looking

    def places(self) -> list[str]:
        """See `Store.places`; in the order of directories, so that a batch opens few of them."""
        return sorted(self._sizes)

    def read(self, places: Sequence[str]) -> Scan:
        """See `Store.read`."""
        rows: list[StoredRow] = []
        gone: list[bytes] = []
        corrupt: list[bytes] = []
        for shard, shard_names in _by_shard(name for name in places if name in self._sizes):
            try:
                with files.open_shard(self._root, shard) as directory:
                    for name in shard_names:
                        self._read_one(directory, name, rows, gone, corrupt)
            except OSError:  # the whole directory is gone, or something else has its name
                gone += [self._forgotten(name) for name in shard_names]
        return Scan(tuple(rows), tuple(gone), tuple(corrupt))

    def sweep(self, now_unix_s: float, dead_pids: frozenset[int]) -> Scan:
        """See `Store.sweep`."""
        self.flush()
        self._reopen_if_replaced()
        present = dict(self._listed(now_unix_s, dead_pids))
        known = list(self._sizes)
        changed = self.read([name for name in known if present.get(name) != self._sizes[name]])
        strangers = [
            name for name in present
            if name not in self._sizes and name not in self._stuck
            and ((lease := self.leases.get(name)) is None or lease.inherited)
        ]  # fmt: skip
        adopted = _merged(self._adopt(name, verify=True) for name in strangers)
        return _merged([changed, adopted])

    def stats(self) -> Stats:
        """See `Store.stats`."""
        return Stats(self._stored_bytes, self.leases.bytes, len(self._sizes))

    def close(self) -> None:
        """See `Store.close`."""
        self.flush()
        os.close(self._lock)
        os.close(self._root)

    # --- one file

    def _read_one(
        self, directory: int, name: str, rows: list[StoredRow], gone: list[bytes], corrupt: list[bytes]
    ) -> None:
        key = names.key_of(name)
        assert key is not None
        location = Location(self._server, self._incarnation, self._sizes[name], 0, name)
        try:
            row = files.read_row(directory, name[3:], key, location)
        except FileNotFoundError:
            gone.append(self._forgotten(name))
        except CorruptImage:
            corrupt.append(key)
            self._unlink(name)
        except OSError:  # unreadable now: not a row for anybody, but not ours to destroy
            gone.append(self._forgotten(name))
        else:
            if row.location.size_bytes != self._sizes[name]:  # replaced by another image of the same key
                self._add(name, row.location.size_bytes)
            rows.append(row)

    def _adopt(self, name: str, *, verify: bool) -> Scan:
        """Take a file into the table if it is a complete image; remove it if it is not one."""
        key = names.key_of(name)
        if key is None:
            return Scan()
        try:
            with self._directory_of(name) as (directory, base):
                if verify:
                    files.read_verified(directory, base, key)
                location = Location(self._server, self._incarnation, 0, 0, name)
                row = files.read_row(directory, base, key, location)
        except CorruptImage:
            self._unlink(name)
            return Scan(corrupt=(key,))
        except OSError:
            return Scan(gone=(self._forgotten(name),) if name in self._sizes else ())
        self._add(name, row.location.size_bytes)
        return Scan(rows=(row,))

    def _add(self, name: str, size_bytes: int) -> None:
        self._forget(name)
        self._sizes[name] = size_bytes
        self._stored_bytes += size_bytes

    def _forget(self, name: str) -> None:
        self._stored_bytes -= self._sizes.pop(name, 0)
        self._touched.pop(name, None)

    def _forgotten(self, name: str) -> bytes:
        """Forget a row whose bytes are gone; its key."""
        self._forget(name)
        key = names.key_of(name)
        assert key is not None
        return key

    def _unlink(self, name: str) -> bool:
        """Forget a row and remove its file; False = it is still there, and is ignored from now on."""
        self._forget(name)
        try:
            with self._directory_of(name) as (directory, base):
                os.unlink(base, dir_fd=directory)
        except FileNotFoundError:
            pass
        except OSError:
            self._stuck.add(name)
            return False
        return True

    # --- the directory

    def _open(self) -> int:
        """The root's descriptor; it is made if it is missing.

        Raises:
            TierUnavailable: it cannot be made or used.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise TierUnavailable(
                f"{self.kind} tier: {str(self.root)!r} cannot be used ({error.strerror})", hint="choose another root"
            ) from error
        if os.fstat(descriptor).st_uid != os.getuid():
            os.close(descriptor)
            raise TierUnavailable(
                f"{self.kind} tier: {str(self.root)!r} belongs to another user", hint="choose another root"
            )
        return descriptor

    def _take_lock(self, root: int) -> int:
        """The lock's descriptor, once whoever held it before let go.

        Raises:
            TierUnavailable: somebody keeps it.
        """
        try:
            descriptor = os.open(
                _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self._root
            )
        except OSError:
            return os.dup(self._root)  # read-only: nobody writes there, nobody has to be kept out
        give_up_s = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() > give_up_s:
                    os.close(descriptor)
                    raise TierUnavailable(
                        f"{self.kind} tier: {str(self.root)!r} is in use by another runtime", hint="choose another root"
                    ) from None
                time.sleep(0.05)

    def _reopen_if_replaced(self) -> None:
        """Somebody removed the root, or put another in its place: go on with what has its name now."""
        with contextlib.suppress(OSError):
            now = os.stat(self.root)
            if os.path.samestat(now, os.fstat(self._root)):
                return
        with contextlib.suppress(TierUnavailable):
            fresh = self._open()
            lock = self._take_lock(fresh)
            os.close(self._root)
            os.close(self._lock)
            self._root, self._lock = fresh, lock

    def _shard_ready(self, shard: str) -> bool:
        for attempt in range(2):
            try:
                with files.open_shard(self._root, shard, create=True) as directory:
                    return os.access(".", os.W_OK, dir_fd=directory)
            except OSError:
                if attempt == 0:
                    self._reopen_if_replaced()
        return False

    def _listed(
        self, now_unix_s: float | None = None, dead_pids: frozenset[int] = frozenset()
    ) -> Iterator[tuple[str, int]]:
        """Complete files and their sizes; leftovers that nobody can be writing any more are removed on the way."""
        now_unix_s = time.time() if now_unix_s is None else now_unix_s
        for shard in _SHARDS:
            with (
                contextlib.suppress(OSError),
                files.open_shard(self._root, shard) as directory,
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
                        elif (
                            found.writer_pid in dead_pids
                            or now_unix_s - state.st_mtime > TEMP_TTL_S
                            or not _is_alive(found.writer_pid)
                        ):
                            os.unlink(entry.name, dir_fd=directory)

    @contextlib.contextmanager
    def _directory_of(self, name: str) -> Iterator[tuple[int, str]]:
        shard, _, base = name.partition("/")
        with files.open_shard(self._root, shard) as directory:
            yield directory, base

    # --- bytes

    def _used_bytes(self) -> int:
        return self._stored_bytes + self.leases.bytes

    def _spare_bytes(self) -> int:
        """What the file system, and on tmpfs the machine's memory, still has for us."""
        found = os.fstatvfs(self._root)
        spare_bytes = found.f_bavail * found.f_frsize
        if self._free_memory is not None:
            spare_bytes = min(spare_bytes, self._free_memory() - RESERVE_BYTES)
        return spare_bytes

    def _usable(self, quota_bytes: int) -> tuple[int, str]:
        """The quota that is really there, and why it is less than what was asked for."""
        found = os.fstatvfs(self._root)
        if not self._can_write():
            return quota_bytes, f"{str(self.root)!r} is read-only: nothing is saved there"
        limits = [(self._stored_bytes + found.f_bavail * found.f_frsize, "the file system has")]
        if self._free_memory is not None:
            limits.append((self._stored_bytes + int(self._free_memory() * MEMORY_SHARE), "memory allows"))
        allowed, why = min(limits)
        if quota_bytes <= allowed:
            return quota_bytes, ""
        return allowed, f"quota lowered from {quota_bytes} to {allowed} bytes: {why} no more"

    def _can_write(self) -> bool:
        return os.access(".", os.W_OK, dir_fd=self._root) and not os.fstatvfs(self._root).f_flag & os.ST_RDONLY


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _by_shard(all_names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for name in all_names:
        groups.setdefault(name[:2], []).append(name)
    yield from groups.items()


def _merged(scans: Iterable[Scan]) -> Scan:
    rows: list[StoredRow] = []
    gone: list[bytes] = []
    corrupt: list[bytes] = []
    for scan in scans:
        rows += scan.rows
        gone += scan.gone
        corrupt += scan.corrupt
    return Scan(tuple(rows), tuple(gone), tuple(corrupt))
