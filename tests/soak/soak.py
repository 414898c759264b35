"""A randomized campaign: mixed traffic while processes are killed, stopped and starved, and files are damaged.

    python -m tests.soak.soak [--minutes M] [--kills N] [--seed S]        run by `make soak`

A campaign is a chain of rounds on one state directory. A round starts a runtime, lets callers ask and a disturber disturb,
comes to rest, looks, and ends while requests run: by a stop, by SIGTERM, or by the death of the supervisor.

Checked all along: every answer is the undisturbed one, every request is answered once, quotas hold, no process grows; at
rest: nothing is left over, and the index is what is stored; at the end: no process, no file. A failure prints its seed, what
happened last, and the smallest round that was found to fail by itself. Exit status 1 after a failure.
"""

import argparse
import contextlib
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from barrel_inference import Client, Runtime, config
from tests.model.tiny_gguf import write_model
from tests.process.killing import POLICY, end_of, wait_for
from tests.soak.disturb import Disturber
from tests.soak.plan import ENDS, MODELS, WEIGHTS, Plan, shrink
from tests.soak.traffic import ANSWER_S, Answers, Caller, Journal, Question
from tests.soak.watch import QUOTA_BYTES, Watch

SETTINGS: dict[str, Any] = {
    "tiers": {name: {"quota_bytes": QUOTA_BYTES} for name in ("ram", "ram_file", "disk")},
    "writer": {"processes": 2, "staging_bytes": "4MiB"},
    "supervisor": {"intensity": 10**6, "model_intensity": 10**6, "backoff_max_s": 0.2, "hang_s": 10},
    "cache": {"block_tokens": 32},
}  # fmt: skip
STUB = {"n_ctx": 2048, "n_batch": 64, "n_seq_max": 4, "kv_cells": 4096}
REAL = {"n_ctx": 1024, "n_batch": 128, "n_threads": 1, "deterministic": True}
TIER_OF = {"stub-ram": "ram", "stub-file": "ram_file", "stub-disk": "disk", "real": "disk"}
# After the supervisor's death its children are gone in this time.
ORPHANS_S = 2.0
# A failed round is tried in smaller forms for so long.
SHRINK_S = 600.0


class Campaign:
    """What outlives a round: the state directory, the right answers, the journal."""

    def __init__(self, folder: Path) -> None:
        self.state_dir = folder / "state"
        self.model_path = folder / "tiny.gguf"
        write_model("dense", self.model_path)
        self.answers = Answers()
        self.journal = Journal()
        self.kills = 0
        self.recovery_s: dict[str, list[float]] = {}

    def load(self, client: Client, plan: Plan) -> None:
        """The models of a round; before the first, the right answers from ones that nobody disturbs."""
        rng = random.Random(f"{plan.seed} questions")
        heads = [[rng.randrange(5, 250) for _ in range(length)] for length in (40, 100, 200)]
        must_learn = not self.answers.by_question
        for name in plan.models:
            path, backend, context, opts = ("none", "stub", STUB, {"step_ms": 1, "bytes_per_token": 1024})
            if name == "real":
                path, backend, context, opts = (str(self.model_path), "llama", REAL, {})
            if must_learn:
                solo = client.load_model(
                    path, backend=backend, context_opts=context, fingerprint=b"\1" * 32, fingerprint_mode="fast_unsafe",
                    policy={"min_tokens": float("inf")},
                )  # fmt: skip
                for number in range(12):
                    head = rng.choice(heads)
                    tail = [rng.randrange(5, 250) for _ in range(rng.randrange(1, 30))]
                    question = Question(name, (*head, *tail, 5 + number), rng.randrange(5, 60))
                    self.answers.learn(client, solo, question)
                client.unload(solo)
            client.load_model(
                path, name, backend=backend, context_opts=context, model_opts=opts, tier=TIER_OF[name], policy=POLICY,
                fingerprint=name.encode().ljust(32, b"\0"), fingerprint_mode="fast_unsafe",
            )  # fmt: skip

    def run(self, plan: Plan, *, max_kills: int = 10**9, until_s: float = float("inf")) -> None:
        """One round; what goes wrong is in the journal."""
        self.journal.note("round", str(plan.number))
        with Runtime(SETTINGS, state_dir=self.state_dir) as runtime:
            client = runtime.client()
            self.load(client, plan)
            watch = Watch(runtime, client, self.journal)
            self._disturb(plan, runtime, client, watch, max_kills, until_s)
            if not self.journal.failures:
                self._end(plan, runtime, client, watch)
        for pid in watch.pids:
            if not end_of(pid, 5.0):
                self.journal.fail(f"process {pid} outlived the runtime")
        if runtime.runtime_dir.exists():
            self.journal.fail(f"{runtime.runtime_dir} outlived the runtime")
        for kind, times_s in watch.recovery_s.items():
            self.recovery_s.setdefault(kind, []).extend(times_s)

    def _disturb(
        self, plan: Plan, runtime: Runtime, client: Client, watch: Watch, max_kills: int, until_s: float
    ) -> None:  # fmt: skip
        callers = self._callers(plan, client, "disturbed")
        disturber = Disturber(plan, runtime, client, watch, self.journal)
        for _ in range(plan.steps):
            if self.journal.failures or self.kills + disturber.kills >= max_kills or time.monotonic() > until_s:
                break
            disturber.step()
            watch.look()
            self._look_at(callers)
        self.kills += disturber.kills
        self._join(callers)
        watch.rest()

    def _callers(self, plan: Plan, client: Client, when: str) -> list[Caller]:
        callers = [
            Caller(client, self.answers, self.journal, plan.rng(f"caller {number} {when}"))
            for number in range(plan.callers)
        ]
        for caller in callers:
            caller.start()
        return callers

    def _look_at(self, callers: list[Caller]) -> None:
        now_s = time.monotonic()
        for caller in callers:
            if caller.asks_since_s and now_s - caller.asks_since_s > ANSWER_S + 10:
                self.journal.fail("a request was neither answered nor refused in time")
                caller.asks_since_s = now_s

    def _join(self, callers: list[Caller]) -> None:
        for caller in callers:
            caller.stopping.set()
        for caller in callers:
            caller.join(ANSWER_S + 10)
            if caller.is_alive():
                self.journal.fail("a caller still waits for an answer")
            if twice := [name for name, count in caller.completed.items() if count > 1]:
                self.journal.fail(f"answered twice: {twice}")

    def _end(self, plan: Plan, runtime: Runtime, client: Client, watch: Watch) -> None:
        """Under traffic, in one of the ways there are."""
        how = plan.rng("end").choice(plan.ends)
        self.journal.note(f"end by {how}")
        if how == "stop":
            return
        callers = self._callers(plan, client, "at the end")
        count = self.journal.counts["answered"]
        with contextlib.suppress(AssertionError):
            wait_for(lambda: self.journal.counts["answered"] > count, "they are at it", 10.0)
        pids = watch.processes()
        for caller in callers:
            caller.is_ending.set()
        os.kill(pids["supervisor"], signal.SIGKILL if how == "kill" else signal.SIGTERM)
        if how == "kill":
            end_s = time.monotonic() + ORPHANS_S
            if left := [name for name, pid in pids.items() if not end_of(pid, max(0.0, end_s - time.monotonic()))]:
                self.journal.fail(f"{ORPHANS_S:g} s after the supervisor's death there are still {left}")
        self._join(callers)

    def report(self) -> None:
        """What happened, in numbers."""
        for kind, count in sorted(self.journal.counts.items()):
            print(f"  {kind}: {count}")
        for kind, times_s in sorted(self.recovery_s.items()):
            ordered = sorted(times_s)
            middle, worst = ordered[len(ordered) // 2], ordered[-1]
            print(f"  back after a kill, {kind}: {len(ordered)} times, median {middle:.2f} s, worst {worst:.2f} s")


@contextlib.contextmanager
def campaign() -> Iterator[Campaign]:
    """A campaign in a folder of its own, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        made = Campaign(Path(folder))
        try:
            yield made
        finally:
            shutil.rmtree(config.ram_file_root(made.state_dir), ignore_errors=True)


def fails(plan: Plan) -> bool:
    """Does this round fail by itself, on an empty state directory?"""
    with campaign() as one:
        one.run(plan)
        print(f"  {'fails' if one.journal.failures else 'passes'}: {plan.command()}", flush=True)
        return bool(one.journal.failures)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""

    def names(text: str) -> tuple[str, ...]:
        return tuple(text.split(","))

    parser = argparse.ArgumentParser(description="A randomized campaign of kills, stops and damage under traffic.")
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after so long")
    parser.add_argument("--kills", type=int, default=10**9, help="stop after so many kills")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--round", type=int, help="run this round alone")
    parser.add_argument("--steps", type=int, default=60, help="of a round")
    parser.add_argument("--callers", type=int, default=6)
    parser.add_argument("--kinds", type=names, default=tuple(WEIGHTS), help="of trouble")
    parser.add_argument("--models", type=names, default=MODELS)
    parser.add_argument("--ends", type=names, default=ENDS, help="ways in which a round ends")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run one campaign; 0 = everything held."""
    given = arguments(argv)
    plan = Plan(
        given.seed, given.round or 0, given.steps, given.callers, given.kinds, given.models, given.ends
    )  # fmt: skip
    print(f"seed {plan.seed}", flush=True)
    began_s = time.monotonic()
    until_s = began_s + given.minutes * 60
    with campaign() as one:
        while True:
            one.run(plan, max_kills=given.kills, until_s=until_s)
            is_over = one.kills >= given.kills or time.monotonic() > until_s or given.round is not None
            if one.journal.failures or is_over:
                break
            plan = plan.next()
    print(f"{one.kills} kills in {time.monotonic() - began_s:.0f} s")
    one.report()
    if not one.journal.failures:
        return 0
    print(f"FAILED with seed {plan.seed} in round {plan.number}; what happened last:")
    print("\n".join([*one.journal.last(), *one.journal.failures[:20]]), flush=True)
    end_s = time.monotonic() + SHRINK_S
    if fails(plan):
        plan = shrink(plan, fails, lambda: time.monotonic() < end_s)
        print(f"the smallest that failed: {plan.command()}")
    else:
        print(f"round {plan.number} passes by itself: run the campaign again, it comes to the same round")
    return 1


if __name__ == "__main__":
    sys.exit(main())
