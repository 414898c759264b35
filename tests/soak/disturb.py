"""What is done to a runtime in a soak run: every method of `Disturber` is one kind of trouble, by its name in the plan."""

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import zmq

from barrel_inference import BarrelError, Client, Runtime
from tests.process.fuzzing import Fuzzer
from tests.process.killing import stopped
from tests.soak.plan import WEIGHTS, Plan
from tests.soak.traffic import Journal
from tests.soak.watch import Watch, stored_files

# A model that no caller asks: it comes and goes.
PASSER_BY = "passer-by"
FRAMES = 300


class Disturber:
    """Draws trouble and makes it."""

    def __init__(self, plan: Plan, runtime: Runtime, client: Client, watch: Watch, journal: Journal) -> None:
        self.kills = 0
        self._plan = plan
        self._runtime = runtime
        self._client = client
        self._watch = watch
        self._journal = journal
        self._rng = plan.rng("disturber")

    def step(self) -> None:
        """One kind of trouble, and a moment of peace."""
        kinds = self._plan.kinds
        kind = self._rng.choices(kinds, [WEIGHTS[one] for one in kinds])[0]
        with contextlib.suppress(ProcessLookupError):
            getattr(self, kind)()
        time.sleep(self._rng.uniform(0.05, 0.6))

    def _victim(self) -> tuple[str, int]:
        found = {name: pid for name, pid in self._watch.processes().items() if name != "supervisor"}
        name = self._rng.choice(sorted(found))
        return name, found[name]

    def kill(self) -> None:
        """SIGKILL of any process but the supervisor."""
        name, pid = self._victim()
        os.kill(pid, signal.SIGKILL)
        self.kills += 1
        self._watch.killed(name, pid)
        self._journal.note("kill", name)

    def halt(self) -> None:
        """SIGSTOP for a moment."""
        name, pid = self._victim()
        pause_s = self._rng.uniform(0.05, 1.5)
        self._journal.note("stop", f"{name} for {pause_s:.2f} s")
        with stopped(pid):
            time.sleep(pause_s)

    def starve(self) -> None:
        """Leave a process one tenth of its time."""
        name, pid = self._victim()
        self._journal.note("starve", name)
        for _ in range(10):
            with stopped(pid):
                time.sleep(0.09)
            time.sleep(0.01)

    def damage(self) -> None:
        """Flip a byte of a stored file, cut it, remove it, or leave rubbish beside it."""
        files = sorted(path for root in self._watch.roots() for path in stored_files(root))
        if not files:
            return
        path = self._rng.choice(files)
        how = self._rng.choice(("flip", "cut", "remove", "rubbish"))
        self._journal.note("damage", f"{how} {path.name[:12]}")
        with contextlib.suppress(OSError):
            damage(path, how, self._rng)

    def evict(self) -> None:
        """Give some of the cache back."""
        self._journal.note("evict")
        with contextlib.suppress(BarrelError):  # the index may be dying just now
            self._client.cache.evict_bytes(self._rng.randrange(1, 1 << 20))

    def fuzz(self) -> None:
        """Messages at the front door that nobody should send."""
        self._journal.note("fuzz")
        fuzzer = Fuzzer(self._rng.randrange(1 << 32), list(self._watch.processes()))
        with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
            raw.setsockopt(zmq.LINGER, 0)
            raw.connect(f"ipc://{self._runtime.runtime_dir / 'router'}")
            for _ in range(FRAMES):
                with contextlib.suppress(zmq.Again):  # the router may be down: then they are lost, as anybody's are
                    raw.send_multipart(fuzzer.client_frames(), zmq.NOBLOCK)
            while raw.poll(200):
                raw.recv_multipart()

    def load(self) -> None:
        """Load a model and unload it, and kill it, or whoever is asked to, somewhere on the way."""
        victim = self._rng.choice((f"model:{PASSER_BY}", "router", "index", None))
        moment_s = self._rng.uniform(0.0, 0.6)
        self._journal.note("load", f"{victim} dies after {moment_s:.2f} s" if victim else "")
        worker = threading.Thread(target=self._come_and_go, daemon=True)
        worker.start()
        if victim is not None:
            time.sleep(moment_s)
            if (pid := self._watch.processes().get(victim)) is not None:
                os.kill(pid, signal.SIGKILL)
                self.kills += 1
        worker.join()

    def _come_and_go(self) -> None:
        for action in (self._load_passer_by, lambda: self._client.unload(PASSER_BY)):
            with contextlib.suppress(BarrelError):  # whoever was to do it has died: said to the caller, as it should be
                action()

    def _load_passer_by(self) -> None:
        self._client.load_model("none", PASSER_BY, backend="stub")


def damage(path: Path, how: str, rng: random.Random) -> None:
    """Do that to a file."""
    size = path.stat().st_size
    if how == "flip":
        with open(path, "r+b") as file:
            file.seek(rng.randrange(max(1, size)))
            old = file.read(1)
            file.seek(-len(old), os.SEEK_CUR)
            file.write(bytes([old[0] ^ 0x40]) if old else b"")
    elif how == "cut":
        os.truncate(path, rng.randrange(max(1, size)))
    elif how == "remove":
        path.unlink()
    else:
        rubbish = path.parent.name + rng.randbytes(31).hex() + path.suffix
        (path.parent / rubbish).write_bytes(b"rubbish")
