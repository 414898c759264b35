"""Which pages of the mapped weights stay in memory, decided from outside llama.cpp: it maps the file, this process's own map
says where, and the kernel is told.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
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
