"""Memory that several processes share: an anonymous file (memfd) owned by one of them, handed to the others by descriptor.

The owner is a RAM tier, or a model process with images on their way to a writer. Whoever wants to map it connects to
`<runtime dir>/<owner id>.arena` and gets the descriptor with the owner's incarnation (SCM_RIGHTS: opening it through /proc
fails when the owner may not be traced). A restarted owner has a new arena; a mapping of the old one keeps its memory alive
until it is closed, and is harmless otherwise.

The file is larger than the capacity and mostly holes, so that fragmentation never refuses what the capacity allows; it is
sealed, because a mapping of a file that shrank kills its reader.
"""

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import socket
import struct
import threading
from collections.abc import Iterable
from pathlib import Path

from barrel_inference.tiers.extents import Extents, Range
from barrel_inference.transport import ipc_endpoint

# First fit needs at most log2(largest / smallest) times the bytes in use (Robson 1977). 16 covers images from one page to
# 256 MiB at their worst; it costs address space only.
VIRTUAL_FACTOR = 16

PAGE_BYTES = mmap.PAGESIZE
# A local owner answers in well under a millisecond; one that is busy for longer is as good as gone.
ATTACH_TIMEOUT_S = 2.0

_GREETING = struct.Struct("<qq")  # incarnation, bytes of the file
_UCRED = struct.Struct("3i")  # pid, uid, gid (unix(7))
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
# Of fcntl(2): Python 3.11 has no names for them in every build.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class ArenaGone(OSError):
    """The arena of that incarnation cannot be mapped: its owner died, or another incarnation serves now."""


class Mapping:
    """One process's mapping of an arena. Any thread may use it."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._map: mmap.mmap | None = mmap.mmap(descriptor, size_bytes)
        self._view: memoryview | None = memoryview(self._map)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.size_bytes = size_bytes

    @classmethod
    def attach(cls, path: Path, expected_incarnation: int) -> "Mapping":
        """Map the arena that is served at `path`; blocks for its owner's answer, up to 2 s.

        Raises:
            ArenaGone
        """
        descriptor = -1
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(ATTACH_TIMEOUT_S)
                connection.connect(str(path))
                greeting, descriptors, _flags, _address = socket.recv_fds(connection, _GREETING.size, 1)
            if len(greeting) != _GREETING.size or len(descriptors) != 1:
                raise ArenaGone(f"{path}: refused")
            descriptor = descriptors[0]
            incarnation, size_bytes = _GREETING.unpack(greeting)
            if incarnation != expected_incarnation:
                raise ArenaGone(f"{path}: incarnation {incarnation} serves now, not {expected_incarnation}")
            return cls(descriptor, size_bytes)
        except ArenaGone:
            raise
        except OSError as error:
            raise ArenaGone(f"{path}: {error}") from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Bytes of the arena; they stay mapped as long as the view lives.

        Raises:
            ArenaGone: the mapping was closed, or has no such bytes.
        """
        whole = self._view
        if whole is None or offset < 0 or size_bytes < 0 or offset + size_bytes > self.size_bytes:
            raise ArenaGone(f"no bytes {offset}+{size_bytes} in this mapping")
        return whole[offset : offset + size_bytes]

    def address(self, offset: int) -> int:
        """Where a byte lies in this process. Valid only while the mapping or a view of it lives."""
        return self._base + offset

    def prefault(self, offset: int, size_bytes: int) -> None:
        """Have the pages of a range in this process's page table, so that a copy into it does not stop at each.

        Called through ctypes: `mmap.madvise` holds the interpreter lock all the while. A kernel that cannot do it leaves
        the faults to the copy.
        """
        with self.view(offset, size_bytes):  # holds the mapping
            start = self.address(offset) // PAGE_BYTES * PAGE_BYTES
            length = self.address(offset) + size_bytes - start
            if _libc.madvise(start, length, _MADV_POPULATE_WRITE) != 0 and ctypes.get_errno() != errno.EINVAL:
                raise OSError(ctypes.get_errno(), "madvise(MADV_POPULATE_WRITE)")

    def close(self) -> None:
        """Let go of the mapping; views that live keep it until they go."""
        # mmap.close() would refuse while a view lives; dropping the references cannot.
        self._view = None
        self._map = None


class Arena:
    """The owner's side. Allocations belong to one thread; `serve` and `close` to the loop's.

    Args:
        capacity_bytes: what may be allocated in all.
        largest_bytes: the capacity that `resize` may reach, if that is more: a sealed file cannot grow later.
    """

    def __init__(self, capacity_bytes: int, largest_bytes: int = 0) -> None:
        self.largest_bytes = max(capacity_bytes, largest_bytes, PAGE_BYTES)
        whole_pages = -(-self.largest_bytes // PAGE_BYTES) * PAGE_BYTES
        self._descriptor = os.memfd_create("barrel-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, whole_pages * VIRTUAL_FACTOR)
        fcntl.fcntl(self._descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
        self.mapping = Mapping(self._descriptor, whole_pages * VIRTUAL_FACTOR)
        self._extents = Extents(capacity_bytes, whole_pages * VIRTUAL_FACTOR)
        self._listener: socket.socket | None = None
        self._path: Path | None = None

    @property
    def capacity_bytes(self) -> int:
        """What may be allocated in all."""
        return self._extents.capacity_bytes

    @property
    def allocated_bytes(self) -> int:
        """What is allocated now."""
        return self._extents.allocated_bytes

    @property
    def warm_bytes(self) -> int:
        """Memory that is kept for the next allocations."""
        return self._extents.warm_bytes

    @property
    def resident_bytes(self) -> int:
        """Memory that the system keeps for the arena."""
        return os.fstat(self._descriptor).st_blocks * 512

    def allocate(self, size_bytes: int) -> int | None:
        """Offset of room for that many bytes; None when the capacity does not allow it."""
        found = self._extents.allocate(size_bytes)
        if found is None:
            return None
        self._punch(found.punch)
        return found.offset

    def free(self, offset: int, *, give_back: bool = False) -> None:
        """Take an allocation back; `give_back` returns its memory to the system, else it is reused warm."""
        gone = self._extents.free(offset, give_back=give_back)
        if gone is not None:
            self._punch([gone])

    def resize(self, capacity_bytes: int) -> None:
        """Let this much be allocated from now on; what lies above it stays until it is freed."""
        assert capacity_bytes <= self.largest_bytes
        self._punch(self._extents.resize(capacity_bytes))

    def size_of(self, offset: int) -> int | None:
        """Size of what is allocated there; None when nothing is."""
        return self._extents.size_of(offset)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """The owner's own view."""
        return self.mapping.view(offset, size_bytes)

    def serve(self, path: Path, incarnation: int) -> None:
        """Hand out the descriptor at `path` to this user's processes, from the running loop."""
        ipc_endpoint(path)  # refuses a path that the kernel would cut
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(64)
        self._listener, self._path = listener, path
        asyncio.get_running_loop().add_reader(listener, self._hand_out, listener, incarnation)

    def close(self) -> None:
        """Stop handing it out and let go of it; other processes keep what they have mapped."""
        if self._listener is not None and self._path is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            self._listener = None
        self.mapping.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _hand_out(self, listener: socket.socket, incarnation: int) -> None:
        try:
            connection, _address = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        with connection:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            if _UCRED.unpack(credentials)[1] != os.getuid():
                return
            greeting = _GREETING.pack(incarnation, self.mapping.size_bytes)
            with contextlib.suppress(OSError):  # it went away: nobody is waiting for this descriptor
                socket.send_fds(connection, [greeting], [self._descriptor])

    def _punch(self, ranges: Iterable[Range]) -> None:
        """Give memory back. A page at the border of a range goes too, if all of it is free."""
        for one in ranges:
            around = self._extents.free_around(one.start, one.end)
            start = max(_page_up(around.start), one.start // PAGE_BYTES * PAGE_BYTES)
            end = min(around.end // PAGE_BYTES * PAGE_BYTES, _page_up(one.end))
            if start >= end:
                continue
            mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
            if _libc.fallocate(self._descriptor, mode, start, end - start) != 0:
                raise OSError(ctypes.get_errno(), "fallocate(FALLOC_FL_PUNCH_HOLE)")


class Mappings:
    """The arenas of other processes that this one has mapped: one mapping per incarnation, made on first use. Any thread."""

    def __init__(self, runtime_dir: Path) -> None:
        self._runtime_dir = runtime_dir
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], Mapping] = {}
        self._down: dict[str, int] = {}  # the last incarnation of each owner that went down

    def get(self, owner: str, incarnation: int) -> Mapping:
        """The mapping of that incarnation's arena; blocks when it is the first use.

        Raises:
            ArenaGone
        """
        with self._lock:
            found = self._open.get((owner, incarnation))
        if found is not None:
            return found
        # Not under the lock: `drop` is called from the loop, which must not wait for a slow owner.
        fresh = Mapping.attach(self._runtime_dir / f"{owner}.arena", incarnation)
        with self._lock:
            if self._down.get(owner) == incarnation:
                raise ArenaGone(f"{owner} went down")
            return self._open.setdefault((owner, incarnation), fresh)

    def drop(self, owner: str, incarnation: int) -> None:
        """That incarnation is down: let its memory go with the last view of it."""
        with self._lock:
            self._down[owner] = incarnation
            found = self._open.pop((owner, incarnation), None)
        if found is not None:
            found.close()

    def close(self) -> None:
        """Let go of all of them."""
        with self._lock:
            for mapping in self._open.values():
                mapping.close()
            self._open.clear()


def _page_up(offset: int) -> int:
    return -(-offset // PAGE_BYTES) * PAGE_BYTES
