"""What must hold in a soak run: at every moment, and at rest."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from barrel_inference import BarrelError, Client, Runtime
from tests.process.killing import descriptors, end_of, wait_for
from tests.soak.traffic import Journal

QUOTA_BYTES = 4 << 20
# What may be there beyond the state before the round: a connection or two that is just being made.
SPARE_DESCRIPTORS = 12
MAX_RSS_BYTES = 600 << 20
# A process may grow by this much from its tenth second on: what its allocator keeps, and an arena of its tier's quota.
GROWTH_BYTES = 48 << 20
GROWN_UP_S = 10.0


class Watch:
    """Looks at one runtime, and writes into the journal what is not as it must be."""

    def __init__(self, runtime: Runtime, client: Client, journal: Journal) -> None:
        self._runtime = runtime
        self._client = client
        self._journal = journal
        self.pids: set[int] = set()
        self.recovery_s: dict[str, list[float]] = {}
        self._killed_s: dict[str, tuple[float, int]] = {}
        self._seen_s: dict[int, float] = {}
        self._rss_bytes: dict[int, int] = {}  # once it was grown up
        self.before = self._settled_descriptors()
        self.pss_before = self.pss_bytes()

    def roots(self) -> list[Path]:
        """The directories of the file tiers."""
        tiers = self._runtime.settings.tiers
        return [Path(tiers[name].root) for name in ("disk", "ram_file")]

    def processes(self) -> dict[str, int]:
        """The pids by process; notes who is back."""
        found = self._runtime.processes()
        self.pids |= set(found.values())
        now_s = time.monotonic()
        for name, (at_s, old) in list(self._killed_s.items()):
            if found.get(name, old) != old:
                self.recovery_s.setdefault(name.partition(":")[0], []).append(now_s - at_s)
                del self._killed_s[name]
        return found

    def killed(self, name: str, pid: int) -> None:
        """It was alive until now."""
        self._killed_s[name] = (time.monotonic(), pid)

    def pss_bytes(self) -> dict[str, int]:
        """Each process's share of memory, what is shared divided by who shares it."""
        found = {}
        for name, pid in self.processes().items():
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                found[name] = int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024
        return found

    # --- at every moment

    def look(self) -> None:
        """Memory is bounded and quotas hold."""
        for name, pid in self.processes().items():
            with contextlib.suppress(OSError, IndexError):
                self._look_at_memory(name, pid)
        for root in self.roots():
            with contextlib.suppress(OSError):
                used = sum(path.stat().st_size for path in stored_files(root))
                if used > QUOTA_BYTES + (1 << 20):  # rubbish is ours, and not counted by anybody
                    self._journal.fail(f"{root} holds {used} bytes, the quota is {QUOTA_BYTES}")

    def _look_at_memory(self, name: str, pid: int) -> None:
        rss_bytes = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if rss_bytes > MAX_RSS_BYTES:
            self._journal.fail(f"{name} has {rss_bytes} bytes of memory")
        now_s = time.monotonic()
        if now_s - self._seen_s.setdefault(pid, now_s) < GROWN_UP_S:
            return
        first_bytes = self._rss_bytes.setdefault(pid, rss_bytes)
        if rss_bytes > first_bytes + GROWTH_BYTES:
            self._journal.fail(f"{name} grew from {first_bytes} to {rss_bytes} bytes")
            self._rss_bytes[pid] = rss_bytes

    # --- at rest

    def rest(self) -> None:
        """Nobody asks any more: everything is back, nothing is left over."""
        self._expect("every process is back", lambda: set(self.processes()) >= set(self.before))
        self._expect("nothing runs or waits", lambda: self._client.queue_depth() == 0)
        self._expect("no claim is left", lambda: not [r for r in self._client.cache.dump() if r.refcount])
        self._expect(
            "no reservation is left", lambda: not any(t.reserved_bytes for t in self._client.cache.stats().tiers), 200
        )
        for root in self.roots():
            self._expect_nothing(f"index = storage in {root}", lambda root=root: self._difference(root), 90)  # type: ignore[misc]
        live = set(self.processes().values())
        for pid in self.pids - live:
            if not end_of(pid, 5.0):
                self._journal.fail(f"process {pid} was left over")
        self._expect_nothing("descriptors left over", self._extra_descriptors)
        self._expect("no zombie is left", lambda: not zombies_of(self._runtime.processes()["supervisor"]))
        self._expect_nothing("grown processes", self._grown)

    def _expect(self, what: str, holds: Callable[[], bool], deadline_s: float = 60.0) -> None:
        def tried() -> bool:
            with contextlib.suppress(BarrelError):
                return holds()
            return False

        try:
            wait_for(tried, what, deadline_s)
        except AssertionError as error:
            self._journal.fail(str(error))

    def _expect_nothing(self, what: str, found: Callable[[], object], deadline_s: float = 60.0) -> None:
        """In the end there is none of it; else what there is."""
        failures = len(self._journal.failures)
        self._expect(what, lambda: not found(), deadline_s)
        if len(self._journal.failures) > failures:
            with contextlib.suppress(BarrelError):
                self._journal.fail(f"{what}: {found()}")

    def _difference(self, root: Path) -> str:
        """Between index and storage; empty if there is none."""
        kind = "disk" if root == self.roots()[0] else "ram_file"
        rows = {r.location for r in self._client.cache.dump() if r.tier == kind and r.status == "available"}
        files = {str(path.relative_to(root)) for path in stored_files(root)}
        if rows == files:
            return ""
        return f"{kind}: rows without a file {sorted(rows - files)[:3]}, files without a row {sorted(files - rows)[:3]}"

    def _descriptors(self) -> dict[str, int]:
        return {name: descriptors(pid) for name, pid in self._runtime.processes().items()}

    def _settled_descriptors(self) -> dict[str, int]:
        """Once nobody connects to anybody any more: who was loaded last is still being told of the others."""
        found = self._descriptors()
        while (now := self._descriptors_later()) != found:
            found = now
        return found

    def _descriptors_later(self) -> dict[str, int]:
        time.sleep(0.5)
        return self._descriptors()

    def _extra_descriptors(self) -> dict[str, str]:
        now = self._descriptors()
        return {
            name: f"{now.get(name)} instead of {count}"
            for name, count in self.before.items()
            if now.get(name, 0) > count + SPARE_DESCRIPTORS
        }

    def _grown(self) -> list[str]:
        now = self.pss_bytes()
        return [name for name, size in self.pss_before.items() if now.get(name, 0) > size + GROWTH_BYTES]


def stored_files(root: Path) -> list[Path]:
    """Images and leftovers, the tier's own lock apart."""
    return [path for path in root.rglob("*") if path.is_file() and path.name != ".lock"]


def zombies_of(parent: int) -> list[int]:
    """Children that ended and were not waited for."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state == "Z" and int(ppid) == parent:
                    found.append(int(entry.name))
    return found
