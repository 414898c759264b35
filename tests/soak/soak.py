"""A randomized campaign: mixed traffic while processes are killed, stopped and starved, and files are damaged.

    python -m tests.soak.soak [--minutes M] [--kills N] [--seed S]        run by `make soak`

Checked all along: every answer is the undisturbed one, every request is answered once, quotas hold, nothing grows; at the
end: nothing is left over, and the index is what is stored. A failure prints its seed and what happened last; the same seed
makes the same decisions again. Exit status 1 after a failure.
"""

import argparse
import contextlib
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from barrel_inference import BarrelError, Client, Runtime
from tests.model.tiny_gguf import write_model
from tests.process.killing import POLICY, descriptors, end_of, stopped, wait_for
from tests.soak.traffic import ANSWER_S, Answers, Caller, Journal, Question

CALLERS = 6
QUOTA_BYTES = 4 << 20
SETTINGS: dict[str, Any] = {
    "tiers": {name: {"quota_bytes": QUOTA_BYTES} for name in ("ram", "ram_file", "disk")},
    "writer": {"processes": 2, "staging_bytes": "4MiB"},
    "supervisor": {"intensity": 10**6, "model_intensity": 10**6, "backoff_max_s": 0.2, "hang_s": 10},
    "cache": {"block_tokens": 32},
}  # fmt: skip
STUB = {"n_ctx": 2048, "n_batch": 64, "n_seq_max": 4, "kv_cells": 4096}
REAL = {"n_ctx": 1024, "n_batch": 128, "n_threads": 1, "deterministic": True}
# What may be there beyond the state before the campaign: a connection or two that is just being made.
SPARE_DESCRIPTORS = 12
MAX_RSS_BYTES = 600 << 20


class Campaign:
    """One runtime, its callers, and who disturbs them."""

    def __init__(self, runtime: Runtime, client: Client, model_path: Path, seed: int) -> None:
        self.runtime = runtime
        self.client = client
        self.seed = seed
        self.rng = random.Random(f"{seed} disturber")
        self.journal = Journal()
        self.answers = Answers()
        self.pids: set[int] = set()
        self.kills = 0
        self.recovery_s: dict[str, list[float]] = {}
        self._killed_s: dict[str, tuple[float, int]] = {}
        self._load(model_path)
        self.callers = [Caller(client, self.answers, self.journal, f"{seed} caller {n}") for n in range(CALLERS)]
        self.before = {name: descriptors(pid) for name, pid in runtime.processes().items()}

    def _load(self, model_path: Path) -> None:
        """Models of every tier, and the right answers from ones that nobody disturbs."""
        rng = random.Random(f"{self.seed} questions")
        heads = [[rng.randrange(5, 250) for _ in range(length)] for length in (40, 100, 200)]
        for name, tier in (("stub-ram", "ram"), ("stub-disk", "disk"), ("stub-file", "ram_file"), ("real", "disk")):
            path, backend, context, opts = ("none", "stub", STUB, {"step_ms": 1, "bytes_per_token": 1024})
            if name == "real":
                path, backend, context, opts = (str(model_path), "llama", REAL, {})
            solo = self.client.load_model(
                path, backend=backend, context_opts=context, fingerprint=b"\1" * 32, fingerprint_mode="fast_unsafe",
                policy={"min_tokens": float("inf")},
            )  # fmt: skip
            for number in range(12):
                head = rng.choice(heads)
                tail = [rng.randrange(5, 250) for _ in range(rng.randrange(1, 30))]
                question = Question(name, (*head, *tail, 5 + number), rng.randrange(5, 60))
                self.answers.learn(self.client, solo, question)
            self.client.unload(solo)
            self.client.load_model(
                path, name, backend=backend, context_opts=context, model_opts=opts, tier=tier, policy=POLICY,
                fingerprint=name.encode().ljust(32, b"\0"), fingerprint_mode="fast_unsafe",
            )  # fmt: skip

    # --- disturbing

    def run(self, until: Callable[[], bool]) -> None:
        """Disturb until it is enough, then let everything come to rest and look at it."""
        for caller in self.callers:
            caller.start()
        actions = ((self.kill, 12), (self.halt, 3), (self.starve, 2), (self.damage, 4), (self.evict, 2))
        while not until() and not self.journal.failures:
            action = self.rng.choices([a for a, _ in actions], [weight for _, weight in actions])[0]
            with contextlib.suppress(ProcessLookupError):
                action()
            time.sleep(self.rng.uniform(0.05, 0.6))
            self.look()
        self.settle()

    def _processes(self) -> dict[str, int]:
        found = self.runtime.processes()
        self.pids |= set(found.values())
        now_s = time.monotonic()
        for name, (at_s, old) in list(self._killed_s.items()):
            if found.get(name, old) != old:
                self.recovery_s.setdefault(name.partition(":")[0], []).append(now_s - at_s)
                del self._killed_s[name]
        return found

    def _victim(self) -> tuple[str, int]:
        found = {name: pid for name, pid in self._processes().items() if name != "supervisor"}
        name = self.rng.choice(sorted(found))
        return name, found[name]

    def kill(self) -> None:
        """SIGKILL of any process but the supervisor."""
        name, pid = self._victim()
        os.kill(pid, signal.SIGKILL)
        self.kills += 1
        self._killed_s[name] = (time.monotonic(), pid)
        self.journal.note("kill", name)

    def halt(self) -> None:
        """SIGSTOP for a moment."""
        name, pid = self._victim()
        pause_s = self.rng.uniform(0.05, 1.5)
        self.journal.note("stop", f"{name} for {pause_s:.2f} s")
        with stopped(pid):
            time.sleep(pause_s)

    def starve(self) -> None:
        """Leave a process one tenth of its time."""
        name, pid = self._victim()
        self.journal.note("starve", name)
        for _ in range(10):
            with stopped(pid):
                time.sleep(0.09)
            time.sleep(0.01)

    def damage(self) -> None:
        """Flip a byte of a stored file, cut it, remove it, or leave rubbish beside it."""
        files = sorted(path for root in self.roots() for path in stored_files(root))
        if not files:
            return
        path = self.rng.choice(files)
        how = self.rng.choice(("flip", "cut", "remove", "rubbish"))
        self.journal.note("damage", f"{how} {path.name[:12]}")
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            if how == "flip":
                with open(path, "r+b") as file:
                    file.seek(self.rng.randrange(max(1, size)))
                    old = file.read(1)
                    file.seek(-len(old), os.SEEK_CUR)
                    file.write(bytes([old[0] ^ 0x40]) if old else b"")
            elif how == "cut":
                os.truncate(path, self.rng.randrange(max(1, size)))
            elif how == "remove":
                path.unlink()
            else:
                rubbish = path.parent.name + self.rng.randbytes(31).hex() + path.suffix
                (path.parent / rubbish).write_bytes(b"rubbish")

    def evict(self) -> None:
        """Give some of the cache back."""
        self.journal.note("evict")
        with contextlib.suppress(BarrelError):  # the index may be dying just now
            self.client.cache.evict_bytes(self.rng.randrange(1, 1 << 20))

    def roots(self) -> list[Path]:
        """The directories of the file tiers."""
        tiers = self.runtime.settings.tiers
        return [Path(tiers[name].root) for name in ("disk", "ram_file")]

    # --- looking

    def look(self) -> None:
        """What must hold at every moment."""
        found = self._processes()
        for name, pid in found.items():
            with contextlib.suppress(OSError, IndexError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                if pages * os.sysconf("SC_PAGE_SIZE") > MAX_RSS_BYTES:
                    self.journal.fail(f"{name} has {pages} pages of memory")
        for root in self.roots():
            with contextlib.suppress(OSError):
                used = sum(path.stat().st_size for path in stored_files(root))
                if used > QUOTA_BYTES + (1 << 20):  # rubbish is ours, and not counted by anybody
                    self.journal.fail(f"{root} holds {used} bytes, the quota is {QUOTA_BYTES}")
        now_s = time.monotonic()
        for caller in self.callers:
            if caller.asks_since_s and now_s - caller.asks_since_s > ANSWER_S + 10:
                self.journal.fail("a request was neither answered nor refused in time")
                caller.asks_since_s = now_s

    def settle(self) -> None:
        """The end: everybody gets the last answer, everything is back, nothing is left over."""
        for caller in self.callers:
            caller.stopping.set()
        for caller in self.callers:
            caller.join(ANSWER_S + 10)
            if caller.is_alive():
                self.journal.fail("a caller still waits for an answer")
            if twice := [name for name, count in caller.completed.items() if count > 1]:
                self.journal.fail(f"answered twice: {twice}")
        self._expect("every process is back", lambda: set(self._processes()) >= set(self.before))
        self._expect("nothing runs or waits", lambda: self.client.queue_depth() == 0)
        self._expect("no claim is left", lambda: not [r for r in self.client.cache.dump() if r.refcount])
        self._expect(
            "no reservation is left", lambda: not any(t.reserved_bytes for t in self.client.cache.stats().tiers), 200
        )
        for root in self.roots():
            self._expect(f"index = storage in {root}", lambda root=root: not self._difference(root), 90)  # type: ignore[misc]
            if difference := self._difference(root):
                self.journal.fail(difference)
        live = set(self._processes().values())
        for pid in self.pids - live:
            if not end_of(pid, 5.0):
                self.journal.fail(f"process {pid} was left over")
        self._expect("no descriptor is left over", self._has_no_extra_descriptors)
        self._expect("no zombie is left", lambda: not zombies_of(self.runtime.processes()["supervisor"]))

    def _expect(self, what: str, holds: Callable[[], bool], deadline_s: float = 60.0) -> None:
        def tried() -> bool:
            with contextlib.suppress(BarrelError):
                return holds()
            return False

        try:
            wait_for(tried, what, deadline_s)
        except AssertionError as error:
            self.journal.fail(str(error))

    def _difference(self, root: Path) -> str:
        """Between index and storage; empty if there is none."""
        kind = "disk" if root == self.roots()[0] else "ram_file"
        rows = {r.location for r in self.client.cache.dump() if r.tier == kind and r.status == "available"}
        files = {str(path.relative_to(root)) for path in stored_files(root)}
        if rows == files:
            return ""
        return f"{kind}: rows without a file {sorted(rows - files)[:3]}, files without a row {sorted(files - rows)[:3]}"

    def _has_no_extra_descriptors(self) -> bool:
        now = {name: descriptors(pid) for name, pid in self.runtime.processes().items()}
        return all(now[name] <= count + SPARE_DESCRIPTORS for name, count in self.before.items())

    def report(self) -> None:
        """What happened, in numbers."""
        for kind, count in sorted(self.journal.counts.items()):
            print(f"  {kind}: {count}")
        for kind, times_s in sorted(self.recovery_s.items()):
            ordered = sorted(times_s)
            middle, worst = ordered[len(ordered) // 2], ordered[-1]
            print(f"  back after a kill, {kind}: {len(ordered)} times, median {middle:.2f} s, worst {worst:.2f} s")


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


def main(argv: list[str] | None = None) -> int:
    """Run one campaign; 0 = everything held."""
    parser = argparse.ArgumentParser(description="A randomized campaign of kills, stops and damage under traffic.")
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after so long")
    parser.add_argument("--kills", type=int, default=10**9, help="stop after so many kills")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    options = parser.parse_args(argv)
    print(f"seed {options.seed}", flush=True)
    end_s = time.monotonic() + options.minutes * 60
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        model_path = Path(folder) / "tiny.gguf"
        write_model("dense", model_path)
        with Runtime(SETTINGS) as runtime, runtime.client() as client:
            campaign = Campaign(runtime, client, model_path, options.seed)
            began_s = time.monotonic()
            campaign.run(lambda: campaign.kills >= options.kills or time.monotonic() > end_s)
            pids, places = campaign.pids, [runtime.runtime_dir, *campaign.roots()]
        for pid in pids:
            if not end_of(pid, 5.0):
                campaign.journal.fail(f"process {pid} outlived the runtime")
        for place in places:
            if place.exists():
                campaign.journal.fail(f"{place} outlived the runtime")
    print(f"{campaign.kills} kills in {time.monotonic() - began_s:.0f} s")
    campaign.report()
    if not campaign.journal.failures:
        return 0
    print(f"FAILED with seed {options.seed}: python -m tests.soak.soak --seed {options.seed}; what happened last:")
    print("\n".join(campaign.journal.last()))
    print("\n".join(campaign.journal.failures[:20]))
    return 1


if __name__ == "__main__":
    sys.exit(main())
