"""The engine thread on the stub engine, without messages, index or tiers (workers/model/scheduler.py)."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from barrel_inference import config
from barrel_inference.errors import (
    ContextOverflow,
    DecodeTimeout,
    NoSession,
    SeqCapacity,
    StickyBusy,
    TranscriptMismatch,
)
from barrel_inference.protocol import Complete, HitKind, Resume, Sampling, SaveReason
from barrel_inference.tiers.policy import Policy
from barrel_inference.workers.model import engine_stub, options
from barrel_inference.workers.model.effects import Found, SaveOrder, StoredNode
from barrel_inference.workers.model.engine import Row
from barrel_inference.workers.model.job import Job, Times
from barrel_inference.workers.model.scheduler import Scheduler
from barrel_inference.workers.model.state import Limits
from barrel_inference.workers.model.text import Piece, Scanner

SETTINGS = config.dump(config.resolve(config.settings_from(config.lay_over({}))))
DEADLINE_S = 10.0


@dataclass
class Recorder:
    """An I/O side that finds nothing stored, accepts every save at once, and publishes it at once or when it is told to."""

    scheduler: Scheduler = field(init=False)
    done: dict[str, threading.Event] = field(default_factory=dict)
    contexts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    saves: list[SaveOrder] = field(default_factory=list)
    unpublished: list[SaveOrder] = field(default_factory=list)
    publishes: bool = True
    on_piece: Callable[[Job], None] = lambda _job: None
    computing: set[str] = field(default_factory=set)
    bug: BaseException | None = None

    def resolve(self, job: Job, live_tokens: int) -> None:
        self.scheduler.post(lambda: self.scheduler.resolved(job, Found(miss_reason="no_entry")))

    def check_in(self, found: Found, used: Sequence[StoredNode], corrupt: Sequence[StoredNode]) -> None:
        pass

    def save(self, order: SaveOrder) -> None:
        self.saves.append(order)
        self.scheduler.post(lambda: self.scheduler.save_packed(order.seq))
        self.unpublished.append(order)
        if self.publishes:
            self.publish()

    def publish(self) -> None:
        """The saves so far are published."""
        orders, self.unpublished = self.unpublished, []
        for order in orders:
            self.scheduler.post(lambda order=order: self.scheduler.save_published(order))  # type: ignore[misc]

    def emit(self, job: Job, pieces: Sequence[Piece]) -> None:
        self.pieces.setdefault(job.id, []).extend(pieces)
        self.on_piece(job)

    def ended(self, job: Job, context: tuple[int, ...]) -> None:
        self.contexts[job.id] = context
        self.done[job.id].set()

    def computes(self, job: Job) -> None:
        self.computing.add(job.id)

    def rests(self, job: Job) -> None:
        self.computing.discard(job.id)

    def changed(self) -> None:
        pass

    def crashed(self, error: BaseException) -> None:
        self.bug = error
        for event in self.done.values():
            event.set()


class Model:
    """A scheduler with a stub engine, driven from a test."""

    def __init__(
        self, n_seq_max: int = 1, deterministic: bool = False, opts: dict[str, object] | None = None, **context: object
    ) -> None:
        parsed = options.parse(
            {
                "backend": "stub",
                "model_path": "none",
                "model_opts": opts or {},
                "context_opts": {"n_ctx": 400, "n_batch": 64, "n_seq_max": n_seq_max, **context},
            },
            SETTINGS,
        )
        self.engine = engine_stub.load(parsed, on_progress=lambda _fraction: None)
        self.io = Recorder()
        policy = Policy(
            min_tokens=4, cold_min_tokens=4, boundary_trim_tokens=0, boundary_align_tokens=1, min_reuse_tokens=4
        )
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


def test_a_reclaimed_sequence_is_the_next_ones(model: Model) -> None:
    """As soon as a session's cells are exported another may have them, and keeps them when the save is published at last; a
    second session is given up although the first one's save still takes its time."""
    model.io.publishes = False
    jobs = [model.run([n, *PROMPT], session_id=str(n)) for n in (1, 2, 3)]
    model.io.publish()
    assert model.run([3, *PROMPT, *jobs[2].generated, 4], session_id="3").hit.kind is HitKind.STICKY
    assert [order.tokens[0] for order in model.io.saves if order.reason is SaveReason.EVICT] == [1, 2]


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


# Every token of such a reply is another one: a token that is counted twice, or left out, shows.
DRAWN = Sampling(temperature=1.0)


def resubmit(model: Model, whole: Job, delivered: Resume, *, stops: tuple[bytes, ...] = ()) -> Job:
    """Send a request again of which `delivered` has arrived."""
    spec = Complete(prompt=PROMPT, resume=delivered, sampling=DRAWN)
    job = Job(
        "again",
        spec,
        PROMPT,
        b"",
        7,
        whole.limit_tokens,
        Scanner(stops),
        Times(0.0),
        generated=list(delivered.token_ids),
    )
    model.io.done[job.id] = threading.Event()
    model.scheduler.post(lambda: model.scheduler.submit(job))
    return model.wait(job)


def streamed(model: Model, job: Job) -> bytes:
    """Every byte that was sent for a request."""
    return b"".join(piece.data for piece in model.io.pieces.get(job.id, []))


@pytest.mark.parametrize("delivered", range(9))
def test_resubmission_continues_after_what_was_delivered(model: Model, delivered: int) -> None:
    """Delivered tokens count as generated: the rest follows, nothing is streamed twice, the result is the same."""
    whole = model.run(PROMPT, 8, sampling=DRAWN)
    ids = whole.generated[:delivered]
    said = b"".join(map(model.engine.piece, ids))
    job = resubmit(model, whole, Resume(attempt=1, token_ids=ids, text_bytes=len(said), seed=7))
    assert (job.generated, job.finish_reason) == (whole.generated, "length")
    assert bytes(job.scanner.reply) == bytes(whole.scanner.reply) == said + streamed(model, job)
    assert model.io.contexts[job.id] == model.io.contexts[whole.id]


def test_resubmission_sends_what_a_delivered_token_had_still_to_say(model: Model) -> None:
    """A token whose text had arrived in part only is not drawn again; the rest of its text follows."""
    whole = model.run(PROMPT, 8, sampling=DRAWN)
    said = b"".join(map(model.engine.piece, whole.generated[:5]))
    delivered = Resume(attempt=1, token_ids=whole.generated[:5], text_bytes=len(said) - 3, seed=7)
    job = resubmit(model, whole, delivered)
    assert said[:-3] + streamed(model, job) == bytes(whole.scanner.reply)
    assert model.io.pieces[job.id][0].token_ids == ()


def test_resubmission_of_a_reply_that_was_let_go(model: Model) -> None:
    """Text that is held back goes out at the end; when only `done` was lost, neither text nor ids come twice."""
    first = model.run(PROMPT, 5, sampling=DRAWN)
    stop = model.engine.piece(first.generated[-1]) + b"never"  # its beginning ends the reply
    whole = model.wait(model.send(PROMPT, 5, stops=(stop,), sampling=DRAWN))
    assert (whole.finish_reason, whole.generated) == ("length", first.generated)
    assert bytes(whole.scanner.reply) == bytes(first.scanner.reply)
    delivered = Resume(attempt=1, token_ids=whole.generated, text_bytes=len(whole.scanner.reply), seed=7)
    job = resubmit(model, whole, delivered, stops=(stop,))
    assert (job.generated, bytes(job.scanner.reply)) == (whole.generated, bytes(whole.scanner.reply))
    assert model.io.pieces.get(job.id, []) == []


def test_resubmission_that_is_cancelled_before_it_runs(model: Model) -> None:
    """The result has what was delivered, also when its turn never came again."""
    running = model.send(PROMPT, 300)
    whole = model.wait(running)
    busy = model.send([9, *PROMPT], 300)
    delivered = Resume(attempt=1, token_ids=whole.generated[:4], text_bytes=28, seed=7)
    job = Job(
        "again", Complete(prompt=PROMPT, resume=delivered), PROMPT, b"", 7, 300, Scanner(), Times(0.0),
        generated=whole.generated[:4],
    )  # fmt: skip
    model.io.done[job.id] = threading.Event()
    model.scheduler.post(lambda: model.scheduler.submit(job))
    model.scheduler.post(lambda: model.scheduler.cancel(job.id))
    assert model.wait(job).finish_reason == "cancelled"
    assert bytes(job.scanner.reply) == b"".join(map(model.engine.piece, whole.generated[:4]))
    model.wait(busy)


def test_resubmission_of_a_reply_that_was_complete(model: Model) -> None:
    """When all had arrived but the end, the end follows, and no token beyond it."""
    first = model.run(PROMPT, 5, sampling=DRAWN)
    stop = model.engine.piece(first.generated[2])
    whole = model.wait(model.send(PROMPT, 5, stops=(stop,), sampling=DRAWN))
    text = len(bytes(whole.scanner.reply))
    delivered = Resume(attempt=1, token_ids=whole.generated, text_bytes=text, seed=7)
    job = resubmit(model, whole, delivered, stops=(stop,))
    assert (job.finish_reason, job.generated, job.scanner.stopped_by) == ("stop", whole.generated, stop)
    assert streamed(model, job) == b""


def test_long_prefill_never_delays_others_by_more_than_a_slice() -> None:
    """While another request generates, every call has its row, and at most one slice of the long prompt."""
    model = Model(n_seq_max=2)
    calls: list[list[tuple[int, int]]] = []
    decode = model.engine.decode

    def noted(rows: Sequence[Row]) -> None:
        calls.append([(row.seq, row.token) for row in rows])
        decode(rows)

    model.engine.decode = noted  # type: ignore[method-assign]
    later: list[Job] = []
    model.io.on_piece = lambda _job: None if later else later.append(model.send(list(range(1000, 1300)), 2))
    first = model.send(PROMPT, 200)
    model.wait(first)
    model.wait(later[0])
    both = [call for call in calls if any(token >= 1000 and token < 1300 for _, token in call)]
    together = [call for call in both if any(seq == 0 for seq, _ in call)]
    assert len(together) > 10
    assert max(len(call) for call in together) <= 16 + 1
    model.stop()


def test_timed_out_step_is_an_error_and_the_model_serves_on() -> None:
    """A step that is interrupted ends its request with `decode_timeout`; the next request is answered."""
    model = Model(opts={"decode_timeout_at": 2})
    job = model.send(PROMPT)
    while not (job.error or (model.scheduler.call_began_s and model.engine.calls >= 2)):
        threading.Event().wait(0.001)
    model.engine.interrupt()
    assert isinstance(model.wait(job).error, DecodeTimeout)
    assert model.run(PROMPT).error is None
    model.stop()


def test_context_that_cannot_fit_is_refused() -> None:
    """A session that has grown to the context's end is `context_overflow` when continued."""
    model = Model(n_ctx=60, kv_cells=60)
    model.run(PROMPT, 20, session_id="s")
    assert isinstance(model.run([1], session_id="s", mode="continue").error, ContextOverflow)
    model.stop()
