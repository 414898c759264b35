"""How many CPU cores this process may use: its affinity, bounded by the CPU quota of its cgroups; and which thread uses which.

The host's count misleads in a container: llama.cpp's threads meet at a barrier after every graph node, so threads beyond
the quota are throttled in the middle of a step and all others wait for them.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

MAX_THREADS = 512  # of one model, whatever its options
_ROOT = Path("/sys/fs/cgroup")

# What the process began with; `spread` changes threads'.
_AFFINITY = frozenset(os.sched_getaffinity(0))

_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # of a parallel region


def cores_within(affinity: int, quotas: Iterable[tuple[int, int]]) -> int:
    """Whole cores under every quota, at least 1. Pure.

    Args:
        quotas: (microseconds of CPU time, per microseconds of real time); a negative or zero quota is no limit.
    """
    allowed = [quota // period for quota, period in quotas if quota > 0 and period > 0]
    return max(1, min([affinity, *allowed]))


def thread_share(cores: int, computing_models: int) -> int:
    """Threads that one of so many computing models may use; a model that computes alone uses what its options say. Pure."""
    return MAX_THREADS if computing_models <= 1 else max(1, cores // computing_models)


def parse_cpu_max(text: str) -> tuple[int, int]:
    """The (quota, period) of a cgroup v2 `cpu.max`; (-1, 100000) = no limit. Pure."""
    quota, _, period = text.strip().partition(" ")
    return (-1 if quota == "max" else int(quota)), int(period or 100_000)


def usable_cores() -> int:
    """Cores this process may use, at least 1."""
    return cores_within(len(_AFFINITY), _quotas())


def places(cores: Sequence[int], *, team: int, working: int) -> list[frozenset[int]]:
    """Where each thread of a team may run: on a core of its own if those that work need all cores, else anywhere. Pure."""
    if team < 2 or working < len(cores):
        return [frozenset(cores)] * team
    return [frozenset({cores[number % len(cores)]}) for number in range(team)]


def leave_first_core() -> None:
    """Keep the calling thread, and those that it starts from now on, from the core where `spread` puts a team's first one."""
    if len(_AFFINITY) > 1:
        _place(frozenset(sorted(_AFFINITY)[1:]))


def spread(*, team: int, working: int) -> None:
    """Place the calling thread and those that compute with it.

    Left to the kernel, two threads of a team now and then share a core for seconds while another is idle: they sleep and
    wake each other at their barriers too often to look like a load that should be moved. A token takes four times as long
    meanwhile.

    Args:
        team: the most threads that compute together.
        working: how many do at present.
    """
    if team < 2:
        return
    try:  # the one that llama.cpp has loaded
        openmp = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:
        return  # its threads come from elsewhere, and stay where the kernel puts them
    wanted = places(sorted(_AFFINITY), team=team, working=working)

    @_BODY  # type: ignore[untyped-decorator]
    def place(_data: object) -> None:
        _place(wanted[openmp.omp_get_thread_num()])

    openmp.GOMP_parallel(place, None, team, 0)  # what gcc makes of `#pragma omp parallel num_threads(team)`


def _place(cores: frozenset[int]) -> None:
    with contextlib.suppress(OSError):  # the cores were taken from us meanwhile
        os.sched_setaffinity(0, cores)


def _quotas() -> list[tuple[int, int]]:
    """The quotas of this process's cgroup and of all above it; what cannot be read counts as no limit."""
    found = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        number, controllers, path = line.split(":", 2)
        v2 = number == "0"
        if not v2 and "cpu" not in controllers.split(","):
            continue
        base = _ROOT if v2 else _ROOT / "cpu"
        here = base / path.lstrip("/")
        for folder in (here, *here.parents):
            if folder == base.parent:
                break
            if v2 and (text := _read(folder / "cpu.max")):
                found.append(parse_cpu_max(text))
            elif not v2 and (quota := _read(folder / "cpu.cfs_quota_us")):
                found.append((int(quota), int(_read(folder / "cpu.cfs_period_us") or 100_000)))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
