"""How much memory may still be taken before the system kills somebody for it.

Going over a control group's limit is SIGKILL for whoever touches the page, not an error, so memory tiers ask first. The
answer is the least of what the machine has available and what each control group above this process leaves; page cache that
the kernel would drop counts as free.
"""

from collections.abc import Iterator
from pathlib import Path

# Of the memory that is free when a tier starts, the share it may plan with: models come after it.
MEMORY_SHARE = 0.5
# Left alone at every moment: page tables, sockets, and what others allocate between our look and our use.
RESERVE_BYTES = 32 * 1024 * 1024


def free_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can still be taken; the roots are arguments for tests."""
    free = [_available(proc / "meminfo")]
    for group in (proc / "self/cgroup").read_text().splitlines():
        _number, controllers, path = group.split(":", 2)
        if controllers == "":
            free += _free_of(cgroups, path, "memory.max", "memory.current", "inactive_file")
            free += _free_of(cgroups / "unified", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = cgroups / "memory"
            free += _free_of(base, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return max(0, min(free))


def _free_of(base: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """What each group from the process's own to the root leaves.

    Inside a container the path is that of the host and may not exist; the container's own group is then the root of the mount.
    """
    group = base / path.lstrip("/")
    while True:
        try:
            limit_text = (group / limit).read_text().strip()
            used = int((group / usage).read_text())
            stat = (group / "memory.stat").read_text()
        except (FileNotFoundError, NotADirectoryError):
            limit_text = "max"
        if limit_text != "max":
            cached = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith(f"{reclaimable} ")), 0)
            yield int(limit_text) - used + cached
        if group == base:
            return
        group = group.parent


def _available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{meminfo} has no MemAvailable; Linux 3.14 or later is needed")
