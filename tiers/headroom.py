"""How much memory may still be taken before the system kills somebody for it.

Going over a control group's limit is SIGKILL for whoever touches the page, not an error, so memory tiers ask first. What
counts is the machine and each control group above this process; page cache that the kernel would drop counts as free, and
what memory tiers hold does not: nobody but they can give it back.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Of the memory that is free when a tier starts, the share it may plan with: models come after it.
MEMORY_SHARE = 0.5
# Left alone at every moment: page tables, sockets, and what others allocate between our look and our use.
RESERVE_BYTES = 32 * 1024 * 1024

MACHINE = "machine"

# Above the second nobody is killed, but every allocation is made to wait.
_V2_LIMITS = ("memory.max", "memory.high")


@dataclass(frozen=True, slots=True)
class Bound:
    """One thing that bounds the memory of this process."""

    name: str  # `MACHINE`, or the control group's directory
    used_bytes: int
    total_bytes: int


def free_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can still be taken; the roots are arguments for tests."""
    return max(0, min(bound.total_bytes - bound.used_bytes for bound in bounds(proc, cgroups)))


def bounds(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> list[Bound]:
    """The machine, and every control group with a limit that this process is in."""
    found = [_machine(proc / "meminfo")]
    for group in (proc / "self/cgroup").read_text().splitlines():
        _number, controllers, path = group.split(":", 2)
        if controllers == "":
            found += _groups(cgroups, path, _V2_LIMITS, "memory.current", "inactive_file")
            found += _groups(cgroups / "unified", path, _V2_LIMITS, "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = cgroups / "memory"
            found += _groups(base, path, ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
    return found


def _groups(base: Path, path: str, limits: tuple[str, ...], usage: str, reclaimable: str) -> Iterator[Bound]:
    """Each limited group from the process's own to the root.

    Inside a container the path is that of the host and may not exist; the container's own group is then the root of the mount.
    """
    group = base / path.lstrip("/")
    while True:
        set_limits = [text for limit in limits if (text := _text(group / limit)) not in ("", "max")]
        used, stat = _text(group / usage), _text(group / "memory.stat")
        if set_limits and used and stat:
            cached = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith(f"{reclaimable} ")), 0)
            yield Bound(str(group), max(0, int(used) - cached), min(map(int, set_limits)))
        if group == base:
            return
        group = group.parent


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _machine(meminfo: Path) -> Bound:
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    try:
        total, available = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except KeyError as missing:
        raise ValueError(f"{meminfo} has no {missing.args[0]}; Linux 3.14 or later is needed") from None
    return Bound(MACHINE, total - available, total)
