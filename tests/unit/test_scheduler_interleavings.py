"""The scheduler under random interleavings of requests and answers, turn by turn on this thread: nothing hangs, nothing spins."""

import queue
import random
from collections.abc import Callable, Sequence

import pytest

from barrel_inference.protocol import Complete, Resume
from barrel_inference.tiers.policy import Policy
from barrel_inference.workers.model import engine_stub, options
from barrel_inference.workers.model.effects import Found, SaveOrder, StoredNode
from barrel_inference.workers.model.job import Job, Times
from barrel_inference.workers.model.scheduler import Scheduler
from barrel_inference.workers.model.state import Limits
from barrel_inference.workers.model.text import Piece, Scanner
from tests.unit.test_scheduler import SETTINGS

SEEDS = range(300)
ACTIONS = 20  # of callers, in one run
MAX_IDLE_TURNS = 20  # in which nothing moved although there was said to be work


class Waits(Exception):
    """The engine thread would sleep now."""


class Inbox(queue.SimpleQueue[Callable[[], None]]):
    """Where the engine thread sleeps; here the I/O side takes its turn instead."""

    def __init__(self, answer: Callable[[], None]) -> None:
        self._answer = answer

    def get(self, block: bool = True, timeout: float | None = None) -> Callable[[], None]:
        return self._answer if self.empty() else super().get(block, timeout)


class Slow:
    """An I/O side whose answers come when the test says so."""

    scheduler: Scheduler

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pending: list[Callable[[], None]] = []
        self.ended_ids: set[str] = set()

    def answer(self) -> None:
        """One answer arrives, mostly the oldest."""
        if not self.pending:
            raise Waits
        self.pending.pop(self.rng.randrange(len(self.pending)) if self.rng.random() < 0.3 else 0)()

    def resolve(self, job: Job, live_tokens: int) -> None:
        self.pending.append(lambda: self.scheduler.resolved(job, Found(miss_reason="no_entry")))

    def save(self, order: SaveOrder) -> None:
        def packed() -> None:
            self.scheduler.save_packed(order.seq)
            self.pending.append(lambda: self.scheduler.save_published(order))

        self.pending.append(packed)

    def ended(self, job: Job, context: tuple[int, ...]) -> None:
        self.ended_ids.add(job.id)

    def check_in(self, found: Found, used: Sequence[StoredNode], corrupt: Sequence[StoredNode]) -> None: ...
    def emit(self, job: Job, pieces: Sequence[Piece]) -> None: ...
    def computes(self, job: Job) -> None: ...
    def rests(self, job: Job) -> None: ...
    def changed(self) -> None: ...

    def crashed(self, error: BaseException) -> None:
        raise error


class World:
    """One model, its callers and its I/O side, all drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        context = {
            "n_ctx": 200,
            "n_batch": 64,
            "n_seq_max": rng.choice([1, 1, 2, 3]),
            "kv_cells": rng.choice([200, 250, 400]),
        }
        parsed = options.parse({"backend": "stub", "model_path": "none", "context_opts": context}, SETTINGS)
        self.io = Slow(rng)
        policy = Policy(
            min_tokens=rng.choice([4, 10**9]), cold_min_tokens=4, boundary_trim_tokens=0, boundary_align_tokens=1,
            min_reuse_tokens=4, continued_interval=rng.choice([16, 2048]),
        )  # fmt: skip
        self.scheduler = self.io.scheduler = Scheduler(
            engine_stub.load(parsed, on_progress=lambda _fraction: None), self.io,
            Limits(policy, 16, parsed.context.warm, rng.random() < 0.2, 16),
        )  # fmt: skip
        self.scheduler._inbox = Inbox(self.io.answer)
        self.jobs: list[Job] = []
        self.waits_for: list[str] = []  # pauses and releases that are not over

    def act(self) -> None:
        """A caller does something."""
        actions = [*[self.submit] * 4, self.cancel, self.end_session, self.release]
        self.rng.choice(actions if "pause" in self.waits_for else [*actions, self.pause])()

    def submit(self) -> None:
        rng, session = self.rng, self.rng.choice([None, "a", "b", "c"])
        own = [rng.randrange(900) for _ in range(rng.randrange(1, 150))]
        prompt = rng.choice([list(range(100, 140)), list(range(200, 230)), own])
        suspect = Resume(attempt=3, token_ids=[], text_bytes=0, seed=7, deaths=2)
        spec = Complete(
            prompt=prompt, session_id=session, on_full=rng.choice(["block", "block", "error"]),
            mode="continue" if session and rng.random() < 0.2 else "complete",
            resume=suspect if rng.random() < 0.1 else None,
        )  # fmt: skip
        limit = rng.choice([0, 3, 40])
        self.jobs.append(Job(f"r{len(self.jobs)}", spec, prompt, b"", 7, limit, Scanner(()), Times(0.0)))
        self.scheduler.submit(self.jobs[-1])

    def cancel(self) -> None:
        if self.jobs:
            self.scheduler.cancel(self.rng.choice(self.jobs).id)

    def end_session(self) -> None:
        self.scheduler.end_session(self.rng.choice("abc"), b"", reset=self.rng.random() < 0.5)

    def release(self) -> None:
        self.waits_for.append("release")
        self.scheduler.release_idle(lambda _freed: self.waits_for.remove("release"))

    def pause(self) -> None:
        """As a change of adapters does."""

        def emptied() -> None:
            assert not self.scheduler.running
            assert not any(s.tokens for s in self.scheduler.table.sequences)
            self.waits_for.remove("pause")
            self.scheduler.resume()

        self.waits_for.append("pause")
        self.scheduler.pause(lambda: self.scheduler.empty(emptied))

    def position(self) -> tuple[object, ...]:
        """Changes whenever anything moves."""
        scheduler = self.scheduler
        stages = [job.stage for job in self.jobs]
        return scheduler.generated_tokens, scheduler.prefilled_tokens, stages, len(self.io.pending), len(self.waits_for)

    def turn(self) -> None:
        """One of the engine thread's."""
        self.scheduler._become_idle()
        self.scheduler._admission.place_waiting()
        self.scheduler._admission.restore_some()
        self.scheduler._decoder.step()
        self.scheduler.table.check()

    def run(self) -> None:
        """Until everybody has an answer."""
        acts, idle_turns = ACTIONS, 0
        while True:
            can_work = self.scheduler._can_work()
            if acts and self.rng.random() < (0.1 if can_work else 0.3 if self.io.pending else 1.0):
                acts -= 1
                self.act()
            elif self.io.pending and (not can_work or self.rng.random() < 0.1):
                self.io.answer()
            elif can_work:
                before = self.position()
                self.turn()
                idle_turns = idle_turns + 1 if self.position() == before else 0
                assert idle_turns < MAX_IDLE_TURNS, self.scheduler.table.sequences
            else:
                return


@pytest.mark.parametrize("first", SEEDS[::50])
def test_every_request_and_every_pause_comes_to_its_end(first: int) -> None:
    """Whatever comes in whatever order: all get answers, nobody turns in vain, and while paused nothing is held."""
    for seed in range(first, first + 50):
        world = World(seed)
        world.run()
        assert {job.id for job in world.jobs} == world.io.ended_ids, seed
        assert not world.waits_for, seed
