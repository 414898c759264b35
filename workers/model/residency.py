"""Which pages of the mapped weights stay in memory, decided from outside llama.cpp: it maps the file, this process's own map
says where, and the kernel is told.
"""

import ctypes
import mmap
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_MAP_FAILED = ctypes.c_void_p(-1).value
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class Mapping:
    """A range of addresses that shows a file."""

    start: int
    end: int


def mappings_of(maps_text: str, files: Sequence[tuple[int, int, int]]) -> list[Mapping]:
    """The ranges of /proc/self/maps that show one of the files, given as (major, minor, inode). Pure."""
    out = []
    for line in maps_text.splitlines():
        fields = line.split(None, 5)
        if len(fields) < 5 or fields[4] == "0":
            continue
        major, minor = (int(part, 16) for part in fields[3].split(":"))
        if (major, minor, int(fields[4])) in files:
            start, end = (int(part, 16) for part in fields[0].split("-"))
            out.append(Mapping(start, end))
    return out


def weights_of(paths: Sequence[Path]) -> list[Mapping]:
    """Where the model's files are mapped in this process."""
    stats = [path.stat() for path in paths]
    files = [(os.major(stat.st_dev), os.minor(stat.st_dev), stat.st_ino) for stat in stats]
    return mappings_of(Path("/proc/self/maps").read_text(), files)


def advise_random(weights: Sequence[Mapping]) -> None:
    """Tell the kernel to read pages only when they are touched (`prefetch = false`); a refusal changes nothing."""
    for part in weights:
        _libc.madvise(ctypes.c_void_p(part.start), ctypes.c_size_t(part.end - part.start), mmap.MADV_RANDOM)


def cached_bytes(path: Path) -> int:
    """How much of a file is in memory now; touches none of it. All of it where the kernel does not tell (files of others)."""
    size = path.stat().st_size
    if not size:
        return 0
    with path.open("rb") as file:
        start = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if start == _MAP_FAILED:
        return 0
    try:
        present = (ctypes.c_ubyte * -(-size // _PAGE))()
        if _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), present):
            return 0
        return min(size, sum(last - first for first, last in resident_runs(bytes(present))) * _PAGE)
    finally:
        _libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(size))


def pin_resident(weights: Sequence[Mapping]) -> int:
    """Lock the pages that are in memory now; returns their bytes, fewer when the process may lock no more."""
    pinned = 0
    for part in weights:
        pages = (part.end - part.start) // _PAGE
        present = (ctypes.c_ubyte * pages)()
        if _libc.mincore(ctypes.c_void_p(part.start), ctypes.c_size_t(pages * _PAGE), present):
            continue
        for first, last in resident_runs(bytes(present)):
            size = (last - first) * _PAGE
            if _libc.mlock(ctypes.c_void_p(part.start + first * _PAGE), ctypes.c_size_t(size)):
                return pinned  # RLIMIT_MEMLOCK: what is locked stays locked
            pinned += size
    return pinned


def raise_memlock_limit() -> None:
    """Let this process lock as much as it may: up to its hard limit."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))


def locked_bytes() -> int:
    """What this process has locked in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1]) * 1024
    return 0


def memlock_advice() -> str:
    """The limit that stands against locking more, and where it is raised."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    said = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
    return f"the limit is {said} (ulimit -l, or LimitMEMLOCK= of the service)"


def resident_runs(present: bytes) -> list[tuple[int, int]]:
    """Runs [first, last) of pages whose lowest bit is set, as `mincore` writes them. Pure."""
    runs: list[tuple[int, int]] = []
    first = None
    for page, flags in enumerate(present):
        if flags & 1 and first is None:
            first = page
        elif not flags & 1 and first is not None:
            runs.append((first, page))
            first = None
    if first is not None:
        runs.append((first, len(present)))
    return runs
