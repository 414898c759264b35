"""How many CPU cores this process may use: its affinity, bounded by the CPU quota of its cgroups.

The host's count misleads in a container: llama.cpp's threads spin at a barrier after every graph node, so threads beyond
the quota are throttled in the middle of a step and all others wait for them.
"""

import os
from collections.abc import Iterable
from pathlib import Path

MAX_THREADS = 512  # of one model, whatever its options
_ROOT = Path("/sys/fs/cgroup")


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
    return cores_within(len(os.sched_getaffinity(0)), _quotas())


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
