"""The images of the file tiers: one file each below a root on tmpfs (`ram_file`) or on disk.

A file gets its final name in one step, by link(2), after its bytes are on the medium; so whatever has such a name is complete,
and everything else is a leftover with a name that says whose. Trailers are rewritten in place, all other bytes never.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from barrel_inference.protocol import Location, Roomed, StoredRow, Tier, Touch
from barrel_inference.tiers import files, kvc, names
from barrel_inference.tiers.headroom import MEMORY_SHARE, RESERVE_BYTES
from barrel_inference.tiers.image_root import ImageRoot
from barrel_inference.tiers.kvc import CorruptImage
from barrel_inference.tiers.leases import Lease, Leases, Owner
from barrel_inference.tiers.store import Scan, Stats, Want


class FileStore:
    """A `Store` in a directory; places are paths below the root.

    `free_memory` is asked when files take memory (tmpfs); on a disk it is None.
    """

    def __init__(
        self, kind: Tier, server: str, incarnation: int, quota_bytes: int, root: Path,
        free_memory: Callable[[], int] | None,
    ) -> None:  # fmt: skip
        self.kind = kind
        self.leases: Leases[str] = Leases()
        self._server = server
        self._incarnation = incarnation
        self._free_memory = free_memory
        self._sizes: dict[str, int] = {}
        self._stored_bytes = 0
        self._touched: dict[str, Touch] = {}
        self._stuck: dict[str, int] = {}  # files that should be gone and could not be removed yet, with their bytes
        self._root = ImageRoot(root)
        for name, size_bytes in self._root.listed():
            self._add(name, size_bytes)
        self.quota_bytes, self.note = self._usable(quota_bytes)

    def set_quota(self, quota_bytes: int) -> None:
        """See `Store.set_quota`."""
        self.quota_bytes, self.note = self._usable(quota_bytes)

    # --- places

    def room(self, owner: Owner, deletes: Sequence[Location], wants: Sequence[Want], *, give_back: bool) -> Roomed:
        """See `Store.room`; files always give back."""
        freed = sum(self.delete(location) for location in deletes)
        locations: list[Location | None] = []
        if wants:
            self._root.reopen_if_replaced()  # writers go by its name
        spare_bytes = self._spare_bytes() if wants else 0
        if self._stuck and spare_bytes < sum(want.size_bytes for want in wants) and self._root.can_write():
            self._remove_stuck()
            spare_bytes = self._spare_bytes()
        refused_bytes = 0
        for want in wants:
            if not self._root.make_ready(names.shard_of(want.key)):
                locations.append(None)
                continue
            if want.size_bytes > spare_bytes:
                locations.append(None)
                refused_bytes += want.size_bytes
                continue
            spare_bytes -= want.size_bytes
            name = names.file_name(want.key)
            location = Location(self._server, self._incarnation, want.size_bytes, 0, name)
            self.leases.add(name, Lease(owner, want.key, location))
            locations.append(location)
        lacking_bytes = max(0, refused_bytes - spare_bytes) if refused_bytes else 0
        return Roomed(locations=locations, freed_bytes=freed, lacking_bytes=lacking_bytes)

    def committed(self, location: Location) -> Scan:
        """See `Store.committed`."""
        lease = self.leases.end(location.name)
        found = self._adopt(location.name, verify=False)
        if lease is not None and not lease.inherited:
            return found._replace(rows=())
        return found

    def free(self, locations: Sequence[Location], living: frozenset[Owner]) -> Scan:
        """See `Store.free`. Until they are complete a writer's bytes are in a file of its own: nobody is waited for."""
        return self._ended([location.name for location in locations])

    def delete(self, location: Location) -> int:
        """See `Store.delete`."""
        if names.key_of(location.name) is None:
            return 0
        lease = self.leases.end(location.name)
        size_bytes = self._sizes.get(location.name, lease.location.size_bytes if lease is not None else 0)
        return size_bytes if self._unlink(location.name) else 0

    def hand_over(self, now_s: float) -> None:
        """See `Store.hand_over`; what they completed is found by the next sweep."""
        for name in self.leases.hand_over(now_s):
            self.leases.end(name)

    def owner_died(self, owner: Owner) -> Scan:
        """See `Store.owner_died`."""
        return self._ended(self.leases.note_death(owner))

    def expire(self, now_s: float) -> Scan:
        """See `Store.expire`."""
        return self._ended(self.leases.expired(now_s))

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
                self._root.directory_of(name) as (directory, base),
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
                with self._root.shard(shard) as directory:
                    for name in shard_names:
                        self._read_one(directory, name, rows, gone, corrupt)
            except OSError:  # the whole directory is gone, or something else has its name
                gone += [self._forgotten(name) for name in shard_names]
        return Scan(tuple(rows), tuple(gone), tuple(corrupt))

    def sweep(self, now_unix_s: float, dead_pids: frozenset[int], live_pids: frozenset[int] = frozenset()) -> Scan:
        """See `Store.sweep`."""
        self.flush()
        self._root.reopen_if_replaced()
        self._remove_stuck()
        present = dict(self._root.listed(now_unix_s, dead_pids, live_pids))
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
        if self.kind is Tier.RAM_FILE:  # a directory on disk is somebody's choice, one in memory is ours
            self._root.remove_if_empty()
        self._root.close()

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

    def _ended(self, leased: Sequence[str]) -> Scan:
        """End leases; what turns out to be complete is kept."""
        for name in leased:
            self.leases.end(name)
        return _merged(self._adopt(name, verify=True) for name in leased if name not in self._sizes)

    def _adopt(self, name: str, *, verify: bool) -> Scan:
        """Take a file into the table if it is a complete image; remove it if it is not one."""
        key = names.key_of(name)
        if key is None:
            return Scan()
        try:
            with self._root.directory_of(name) as (directory, base):
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
        self._stuck.pop(name, None)  # it is wanted again
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
        """Forget a row and remove its file; False = it is still there, and is no row any more."""
        size_bytes = self._sizes.get(name, 0)
        self._forget(name)
        try:
            with self._root.directory_of(name) as (directory, base):
                files.remove(directory, base)
        except FileNotFoundError:
            pass
        except OSError:
            self._stuck[name] = size_bytes
            return False
        return True

    def _remove_stuck(self) -> None:
        """Try again: the file system may have been made writable."""
        for name, size_bytes in list(self._stuck.items()):
            if name not in self.leases:  # else a writer is about to find it, and to keep or replace it
                del self._stuck[name]
                if not self._unlink(name):
                    self._stuck[name] = size_bytes

    # --- bytes

    def _spare_bytes(self) -> int:
        """What the quota, the file system, and on tmpfs the machine's memory still have for us."""
        # Of the places that are leased, some bytes may be in the file system already: this counts them twice, never not.
        free_bytes = self._root.free_bytes() - self.leases.bytes
        if self._free_memory is not None:
            free_bytes = min(free_bytes, self._free_memory() - RESERVE_BYTES - self.leases.bytes)
        taken_bytes = self._stored_bytes + self.leases.bytes + sum(self._stuck.values())
        return min(free_bytes, self.quota_bytes - taken_bytes)

    def _usable(self, quota_bytes: int) -> tuple[int, str]:
        """The quota that is really there, and why it is less than what was asked for."""
        if not self._root.can_write():
            return quota_bytes, f"{str(self._root.path)!r} is read-only: nothing is saved there"
        limits = [(self._stored_bytes + self._root.free_bytes(), "the file system has")]
        if self._free_memory is not None:
            limits.append((self._stored_bytes + int(self._free_memory() * MEMORY_SHARE), "memory allows"))
        allowed, why = min(limits)
        if quota_bytes <= allowed:
            return quota_bytes, ""
        return allowed, f"quota lowered from {quota_bytes} to {allowed} bytes: {why} no more"


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
