"""Free memory is what the tightest control group leaves."""

from pathlib import Path

import pytest

from barrel_inference.tiers.headroom import free_memory_bytes
from barrel_inference.tiers.leases import Owner
from barrel_inference.tiers.store import Want
from barrel_inference.tiers.store_memory import MemoryStore, lowered_to_memory

MIB = 1024 * 1024


def machine(tmp_path: Path, groups: str) -> tuple[Path, Path]:
    """A /proc with 1,000 MiB available, and an empty place for control groups."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable: {1000 * 1024} kB\n")
    (proc / "self/cgroup").write_text(groups)
    cgroups = tmp_path / "cgroup"
    cgroups.mkdir()
    return proc, cgroups


def group(at: Path, names: tuple[str, str], limit: str, used_bytes: int, cached: str) -> None:
    """One control group's files."""
    at.mkdir(parents=True, exist_ok=True)
    (at / names[0]).write_text(f"{limit}\n")
    (at / names[1]).write_text(f"{used_bytes}\n")
    (at / "memory.stat").write_text(f"anon 5\n{cached}\n")


V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_machine_without_limits(tmp_path: Path) -> None:
    """Without control groups it is what the machine has available."""
    assert free_memory_bytes(*machine(tmp_path, "0::/\n")) == 1000 * MIB


def test_tightest_group_counts(tmp_path: Path) -> None:
    """A limit of a group above ours counts; cache that would be dropped is free."""
    proc, cgroups = machine(tmp_path, "0::/system.slice/barrel.service\n")
    group(cgroups / "system.slice", V2, str(500 * MIB), 400 * MIB, f"inactive_file {50 * MIB}")
    group(cgroups / "system.slice/barrel.service", V2, "max", 100 * MIB, "inactive_file 0")
    assert free_memory_bytes(proc, cgroups) == 150 * MIB


def test_throttling_counts_as_a_limit(tmp_path: Path) -> None:
    """Above `memory.high` every allocation waits, so a group is full there already."""
    proc, cgroups = machine(tmp_path, "0::/box\n")
    group(cgroups / "box", V2, "max", 100 * MIB, f"inactive_file {20 * MIB}")
    (cgroups / "box/memory.high").write_text(f"{200 * MIB}\n")
    assert free_memory_bytes(proc, cgroups) == 120 * MIB


def test_path_of_the_host_inside_a_container(tmp_path: Path) -> None:
    """When our path does not exist here, the mount's root is our group."""
    proc, cgroups = machine(tmp_path, "0::/docker/abc\n")
    group(cgroups, V2, str(300 * MIB), 100 * MIB, "inactive_file 0")
    assert free_memory_bytes(proc, cgroups) == 200 * MIB


def test_first_version_of_control_groups(tmp_path: Path) -> None:
    """The older layout is read too."""
    proc, cgroups = machine(tmp_path, "4:memory:/box\n3:cpuset:/\n")
    group(cgroups / "memory/box", V1, str(200 * MIB), 250 * MIB, "total_inactive_file 0")
    assert free_memory_bytes(proc, cgroups) == 0


@pytest.mark.parametrize(
    ("quota_bytes", "free_bytes", "usable_bytes"),
    [(100, 200, 100), (101, 200, 100), (4096, 0, 0)],
)
def test_quota_is_lowered_with_a_note(quota_bytes: int, free_bytes: int, usable_bytes: int) -> None:
    """A quota takes at most half of the free memory, and says so when it is less than what was asked for."""
    usable, note = lowered_to_memory(quota_bytes, free_bytes)
    assert usable == usable_bytes
    assert (f"lowered from {quota_bytes} to {usable_bytes} bytes" in note) == (usable != quota_bytes)


def test_quota_that_grows_counts_what_is_held() -> None:
    """What the tier holds already may stay beside half of the free memory; more is lowered, and above its address space too."""
    free = [64 * MIB]
    store = MemoryStore("tier:ram", 1, 20 * MIB, lambda: free[0])
    try:
        store.room(Owner("model:tiny", 1), [], [Want(bytes(32), 8 * MIB)], give_back=False)
        store.set_quota(60 * MIB)
        assert (store.quota_bytes, "lowered from" in store.note) == (40 * MIB, True)
        free[0] = 1024 * MIB
        store.set_quota(60 * MIB)
        assert (store.quota_bytes, store.note) == (60 * MIB, "")
        store.set_quota(128 * MIB)
        assert (store.quota_bytes, "until tier:ram is restarted" in store.note) == (64 * MIB, True)
    finally:
        store.close()


def test_no_place_when_memory_got_short() -> None:
    """A quota that was fine at the start is not used when the memory is gone since: no place, instead of a kill."""
    free = [1024 * MIB]
    store = MemoryStore("tier:ram", 1, 64 * MIB, lambda: free[0])
    try:
        assert store.note == ""
        free[0] = 40 * MIB
        wants = [Want(bytes(32), 4 * MIB), Want(bytes(32), 8 * MIB)]
        places = store.room(Owner("model:tiny", 1), [], wants, give_back=False).locations
        assert [place is not None for place in places] == [True, False]
    finally:
        store.close()
