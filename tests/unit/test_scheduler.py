"""The engine thread on the stub engine, without messages, index or tiers (workers/model/scheduler.py)."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from barrel_inference import config
from barrel_inference.errors import ContextOverflow, NoSession, SeqCapacity, StickyBusy, TranscriptMismatch
from barrel_inference.protocol import Complete, HitKind, SaveReason
from barrel_inference.tiers.policy import Policy
from barrel_inference.workers.model import engine_stub, options
from barrel_inference.workers.model.effects import Found, SaveOrder, StoredNode
from barrel_inference.workers.model.job import Job, Times
from barrel_inference.workers.model.scheduler import Limits, Scheduler
from barrel_inference.workers.model.text import Piece, Scanner

SETTINGS = config.dump(config.resolve(config.settings_from(config.lay_over({}))))
DEADLINE_S = 10.0


@dataclass
class Recorder:
    """An I/O side that finds nothing stored, and accepts every save at once."""

    scheduler: Scheduler = field(init=False)
    done: dict[str, threading.Event] = field(default_factory=dict)
    contexts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    saves: list[SaveOrder] = field(default_factory=list)
    on_piece: Callable[[Job], None] = lambda _job: None
    bug: BaseException | None = None

    def resolve(self, job: Job) -> None:
        self.scheduler.post(lambda: self.scheduler.resolved(job, Found(miss_reason="no_entry")))

    def check_in(self, found: Found, used: Sequence[StoredNode], corrupt: Sequence[StoredNode]) -> None:
        pass

    def save(self, order: SaveOrder) -> None:
        self.saves.append(order)
        self.scheduler.post(lambda: self.scheduler.save_packed(order.seq))
        self.scheduler.post(lambda: self.scheduler.save_published(order))

    def emit(self, job: Job, pieces: Sequence[Piece]) -> None:
        self.pieces.setdefault(job.id, []).extend(pieces)
        self.on_piece(job)

    def ended(self, job: Job, context: tuple[int, ...]) -> None:
        self.contexts[job.id] = context
        self.done[job.id].set()

    def changed(self) -> None:
        pass

    def crashed(self, error: BaseException) -> None:
        self.bug = error
        for event in self.done.values():
            event.set()


class Model:
    """A scheduler with a stub engine, driven from a test."""

    def __init__(self, n_seq_max: int = 1, deterministic: bool = False, **context: object) -> None:
        parsed = options.parse(
            {
                "backend": "stub",
                "model_path": "none",
                "context_opts": {"n_ctx": 400, "n_batch": 64, "n_seq_max": n_seq_max, **context},
            },
            SETTINGS,
        )
        self.engine = engine_stub.load(parsed, on_progress=lambda _fraction: None)
        self.io = Recorder()
        policy = Policy(min_tokens=4, cold_min_tokens=4, boundary_trim_tokens=0, boundary_align_tokens=1, min_reuse_tokens=4)
        limits = Limits(policy, 16, parsed.context.warm, deterministic, 16)
        self.scheduler = self.io.scheduler = Scheduler(self.engine, self.io, limits)
        self.scheduler.start()
        self.count = 0

    def send(self, prompt: list[int], tokens: int = 3, *, stops: tuple[bytes, ...] = (), **spec: object) -> Job:
        self.count += 1
        asked = Complete(prompt=prompt, **spec)  # type: ignore[arg-type]
        job = Job(f"r{self.count}", asked, list(prompt), b"", 7, tokens, Scanner(stops), Times(0.0))
        self.io.done[job.id] = threading.Event()
        self.scheduler.post(lambda: self.scheduler.submit(job))
        return job

    def wait(self, job: Job) -> Job:
        assert self.io.done[job.id].wait(DEADLINE_S), job.stage
        if self.io.bug:
            raise self.io.bug
        return job

    def run(self, prompt: list[int], tokens: int = 3, **spec: object) -> Job:
        return self.wait(self.send(prompt, tokens, **spec))  # type: ignore[arg-type]

    def stop(self) -> None:
        self.scheduler.stop()
        self.scheduler.join(DEADLINE_S)
        if self.io.bug:
            raise self.io.bug
        self.scheduler.table.check()


@pytest.fixture
def model() -> Iterator[Model]:
    made = Model()
    yield made
    made.stop()


@pytest.fixture
def shared() -> Iterator[Model]:
    made = Model(n_seq_max=3)
    yield made
    made.stop()


PROMPT = list(range(100, 140))


def test_answer_and_context(model: Model) -> None:
    """The context is the prompt and every generated token, all of them computed."""
    job = model.run(PROMPT)
    assert (job.error, job.finish_reason, len(job.generated)) == (None, "length", 3)
    assert model.io.contexts[job.id] == (*PROMPT, *job.generated)
    assert job.hit.kind is HitKind.COLD


def test_same_prompt_again_is_live_and_exact(model: Model) -> None:
    """A finished sequence keeps its cells: the same prompt computes its last token only, and says the same."""
    first = model.run(PROMPT)
    before = model.scheduler.prefilled_tokens
    second = model.run(PROMPT)
    assert (second.hit.kind, second.hit.source, second.hit.read_tokens) == (HitKind.EXACT, "live", len(PROMPT))
    assert second.generated == first.generated
    assert model.scheduler.prefilled_tokens - before == 1


def test_live_match_of_a_diverging_prompt(model: Model) -> None:
    """What follows the common prefix is computed as if nothing had been there."""
    model.run(PROMPT)
    other = [*PROMPT[:30], 7, 8, 9]
    job = model.run(other)
    alone = Model()
    assert job.generated == alone.run(other).generated
    alone.stop()
    assert (job.hit.kind, job.hit.read_tokens) == (HitKind.PARTIAL, 30)


def test_saves_of_a_cold_prompt(model: Model) -> None:
    """A cold prompt is saved at its boundary, and with its reply when it ends."""
    job = model.run(PROMPT)
    assert [(order.reason, len(order.tokens)) for order in model.io.saves] == [
        (SaveReason.COLD, 40),
        (SaveReason.FINISH, 43),
    ]
    assert model.io.saves[-1].tokens == model.io.contexts[job.id]


def test_followers_share_a_head_that_is_being_computed(shared: Model) -> None:
    """Three requests that arrive together with one head compute it once."""
    jobs = [shared.send([*PROMPT, tail, tail + 1]) for tail in (1, 3, 5)]
    for job in jobs:
        shared.wait(job)
    assert shared.scheduler.prefilled_tokens == len(PROMPT) + 3 * 2
    alone = Model()
    assert [job.generated for job in jobs] == [alone.run([*PROMPT, t, t + 1]).generated for t in (1, 3, 5)]
    alone.stop()


def test_cancel_of_the_leader_leaves_its_followers(shared: Model) -> None:
    """Another follower goes on from the cancelled leader's cells."""
    leader = shared.send(PROMPT, 300)
    shared.io.on_piece = lambda job: shared.scheduler.cancel(job.id) if job is leader else None
    follower = shared.send([*PROMPT, 1])
    shared.wait(follower)
    assert shared.wait(leader).finish_reason == "cancelled"
    assert follower.error is None
    assert shared.scheduler.prefilled_tokens <= len(PROMPT) + 1 + 1


def test_session_turns(model: Model) -> None:
    """A session goes on in its own sequence, by prompt and by suffix."""
    first = model.run(PROMPT, session_id="s")
    second = model.run([*model.io.contexts[first.id], 1, 2], session_id="s")
    assert (second.hit.kind, second.hit.read_tokens) == (HitKind.STICKY, 43)
    third = model.run([5, 6], session_id="s", mode="continue")
    assert (third.hit.kind, third.hit.read_tokens) == (HitKind.CONTINUATION, 48)
    assert third.prompt_tokens == 50
    empty = model.run([], session_id="s", mode="continue")
    assert (empty.error, len(empty.generated)) == (None, 3)


def test_session_refusals(model: Model) -> None:
    """Unknown, busy and mismatching sessions are named errors, and prefill nothing."""
    assert isinstance(model.run([1], session_id="x", mode="continue").error, NoSession)
    first = model.run(PROMPT, session_id="s")
    held = model.io.contexts[first.id]
    before = model.scheduler.prefilled_tokens
    wrong = model.run([1], session_id="s", mode="continue", expect_committed=[*held, 9])
    assert isinstance(wrong.error, TranscriptMismatch)
    assert wrong.error.details == {"stored": 43, "expected": 44, "diverge": 43}
    assert model.scheduler.prefilled_tokens == before
    running = model.send([*held, 1], 100, session_id="s")
    assert isinstance(model.run([*held, 2], session_id="s").error, StickyBusy)
    assert model.wait(running).error is None


def test_idle_session_is_reclaimed_with_a_save(model: Model) -> None:
    """Another request on the only sequence saves the idle session first; going on with it is `no_session`."""
    model.run(PROMPT, session_id="s")
    job = model.run(list(range(300, 330)))
    assert job.error is None
    assert SaveReason.EVICT in [order.reason for order in model.io.saves]
    assert isinstance(model.run([1], session_id="s", mode="continue").error, NoSession)


def test_full_house_is_an_error_when_asked(model: Model) -> None:
    """`on_full="error"` fails at once while the only sequence is busy."""
    running = model.send(PROMPT, 200)
    assert isinstance(model.run([1, 2], on_full="error").error, SeqCapacity)
    model.wait(running)


def test_requests_are_served_in_order(model: Model) -> None:
    """One sequence, three requests: they end in the order of their arrival."""
    jobs = [model.send([n, *PROMPT]) for n in (1, 2, 3)]
    for job in jobs:
        model.wait(job)
    assert [job.times.ended_s for job in jobs] == sorted(job.times.ended_s for job in jobs)


def test_cells_run_out_and_the_last_is_preempted() -> None:
    """Three long requests in cells for less than all: each still answers as it would alone."""
    model = Model(n_seq_max=3, kv_cells=400, n_ctx=300)
    prompts = [[n, *range(n * 1000, n * 1000 + 150)] for n in (1, 2, 3)]
    jobs = [model.send(prompt, 20) for prompt in prompts]
    for job in jobs:
        assert model.wait(job).error is None
    alone = Model(n_ctx=300)
    assert [job.generated for job in jobs] == [alone.run(prompt, 20).generated for prompt in prompts]
    alone.stop()
    model.stop()


def test_stop_sequence_ends_the_reply(model: Model) -> None:
    """The reply ends before the stop sequence; the tokens that spelt it are in the token list."""
    first = model.run(PROMPT, 5)
    stop = model.engine.piece(first.generated[2])
    job = model.wait(model.send(PROMPT, 5, stops=(stop,)))
    assert job.finish_reason == "stop"
    assert job.scanner.stopped_by == stop
    assert stop not in bytes(job.scanner.reply)


def test_prefill_only(model: Model) -> None:
    """`prefill` computes the prompt and generates nothing."""
    job = model.run(PROMPT, 0, mode="prefill")
    assert (job.generated, model.io.contexts[job.id]) == ([], tuple(PROMPT))


def test_deterministic_requests_take_turns() -> None:
    """Only one sequence holds cells at a time, and every reply equals its solo run."""
    model = Model(n_seq_max=3, deterministic=True)
    jobs = [model.send([n, *PROMPT], 5) for n in (1, 2, 3)]
    for job in jobs:
        model.wait(job)
        assert model.io.contexts[job.id][0] == job.prompt[0]
    alone = Model(deterministic=True)
    assert [job.generated for job in jobs] == [alone.run([n, *PROMPT], 5).generated for n in (1, 2, 3)]
    alone.stop()
    model.stop()


def test_resubmission_continues_after_what_was_delivered(model: Model) -> None:
    """Delivered tokens count as generated: the rest follows, and nothing is streamed twice."""
    whole = model.run(PROMPT, 8)
    job = Job("again", Complete(prompt=PROMPT), PROMPT, b"", 7, 8, Scanner(), Times(0.0), generated=whole.generated[:5])
    model.io.done[job.id] = threading.Event()
    model.scheduler.post(lambda: model.scheduler.submit(job))
    model.wait(job)
    assert job.generated == whole.generated
    assert bytes(job.scanner.reply) == bytes(whole.scanner.reply)
    streamed = b"".join(piece.data for piece in model.io.pieces[job.id])
    assert streamed == b"".join(model.engine.piece(t) for t in whole.generated[5:])


def test_context_that_cannot_fit_is_refused() -> None:
    """A session that has grown to the context's end is `context_overflow` when continued."""
    model = Model(n_ctx=60, kv_cells=60)
    model.run(PROMPT, 20, session_id="s")
    assert isinstance(model.run([1], session_id="s", mode="continue").error, ContextOverflow)
    model.stop()
