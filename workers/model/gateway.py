"""Between callers and the engine thread: requests in, events out. Runs on the I/O thread.

Implements `Effects`: each method hops from the engine thread to the loop.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from barrel_inference import codec, protocol
from barrel_inference.actor import Actor, Request
from barrel_inference.errors import (
    BarrelError,
    ContextOverflow,
    InternalError,
    InvalidArgument,
    ModelDown,
    NotSupported,
    Overloaded,
)
from barrel_inference.protocol import Complete, HitKind, Message, ModelRow, SaveReason
from barrel_inference.transport import Unreachable
from barrel_inference.workers.blackbox import Recorder, path_of
from barrel_inference.workers.model import reporting
from barrel_inference.workers.model.cache_client import CacheClient, SaveResult
from barrel_inference.workers.model.effects import Found, SaveOrder, StoredNode
from barrel_inference.workers.model.engine import Engine
from barrel_inference.workers.model.job import Job, Stage, Times
from barrel_inference.workers.model.outbox import Outbox
from barrel_inference.workers.model.scheduler import Scheduler
from barrel_inference.workers.model.stream import Stream
from barrel_inference.workers.model.text import Markers, Piece, Scanner

PROGRESS_S = 0.5

# A done event waits this long at most for the index to accept the request's saves; then `finish_key` is None.
ACCEPT_DEADLINE_S = 2.0

# The first token passes four processes on its way; the next decode call would take the cores from all of them.
FIRST_EVENT_S = 0.001

# Where the vocabulary does not tell how long its longest piece is: what is longer than n_ctx times this is refused untokenised.
MAX_BYTES_PER_TOKEN = 512

_HIT_COUNTERS = {
    HitKind.EXACT: "hits_exact",
    HitKind.STICKY: "hits_sticky",
    HitKind.CONTINUATION: "hits_continuation",
    HitKind.COLD: "misses",
}


class _Open:
    """A request that has no terminal event yet."""

    __slots__ = ("job", "request", "saves", "stream", "timer")

    def __init__(self, request: Request, job: Job, stream: Stream) -> None:
        self.request = request
        self.job = job
        self.stream = stream
        self.saves: list[asyncio.Future[SaveResult]] = []
        self.timer: asyncio.TimerHandle | None = None


class Gateway:
    """The I/O side of a model process. `cache` and `scheduler` are set once the engine is there."""

    cache: CacheClient
    scheduler: Scheduler
    engine: Engine

    def __init__(
        self,
        actor: Actor,
        *,
        markers: Markers,
        render_chat: Callable[[Complete], Awaitable[bytes]],
        row: Callable[[], ModelRow],
        on_changed: Callable[[], None],
    ) -> None:
        self.actor = actor
        self.markers = markers
        self.render_chat = render_chat
        self.row = row
        self.on_changed = on_changed
        self.on_first_end: Callable[[], object] | None = None  # called when the first request has ended
        self.open: dict[str, _Open] = {}
        self.last_hit: dict[str, Any] | None = None
        self.last_used_unix_s = 0.0
        self.max_queue = 1024
        self.recorder = Recorder(path_of(actor.runtime_dir, actor.id))
        self._outbox = Outbox(actor.loop, self._pump_streams)
        self._counted_prefilled = 0
        self._arriving: dict[str, Request] = {}  # being tokenised
        self._cancelled_early: set[str] = set()  # of those
        self._is_stopping = False
        self._ending: set[asyncio.Task[None]] = set()
        self._saving: set[asyncio.Task[None]] = set()
        actor.on(Complete, self.complete)
        actor.on(protocol.Cancel, self._cancel)
        actor.on(protocol.Credit, self._credit)
        actor.on(protocol.Gone, self._gone)
        actor.every(PROGRESS_S, self._progress)

    # --- requests in

    def complete(self, spec: Complete, request: Request) -> Coroutine[Any, Any, None]:
        """Admit one request; its answer comes through the stream."""
        if self._is_stopping:
            raise ModelDown(f"{self.actor.id} is stopping", process=self.actor.id, accepted=False)
        salt = self.salt(request)
        self._arriving[request.id] = request  # now: a cancel may be the very next message
        return self._admit(spec, request, salt)

    async def _admit(self, spec: Complete, request: Request, salt: bytes) -> None:
        if request.id not in self.open:
            self.recorder.computes(request.id)
        try:
            prompt = await self._prompt(spec)
            job = self._job(spec, request, prompt, salt)
            self._check_queue(request)
        except BarrelError as refused:
            self.actor.log.info("request.refused", request=request.id, code=refused.code)
            raise
        finally:
            self._arriving.pop(request.id, None)
            is_cancelled = request.id in self._cancelled_early
            self._cancelled_early.discard(request.id)
            # Here, not in the engine's thread: that may be dying of another request just now
            if request.id not in self.open:
                self.recorder.rests(request.id)
        if (older := self.open.get(request.id)) is not None:  # a resubmission overtook the first try
            self._drop(older)

        def send(kind: str, body: Message) -> None:
            try:
                request.event(kind, body)
            except Unreachable:
                self._cancel_job(request.id)

        entry = _Open(request, job, Stream(send, request.credit, job.seed, spec.event_interval_ms / 1000))
        self.open[request.id] = entry
        if request.deadline_s is not None:
            left_s = max(0.0, request.deadline_s - time.monotonic())
            entry.timer = self.actor.loop.call_later(
                left_s, lambda: self.scheduler.post(lambda: self.scheduler.expire(request.id))
            )
        self.last_used_unix_s = time.time()
        self.actor.log.info(
            "request.admitted", request=job.id, mode=spec.mode, prompt_tokens=len(prompt), limit_tokens=job.limit_tokens,
            attempt=job.attempt,
        )  # fmt: skip
        self.scheduler.post(lambda: self.scheduler.submit(job))
        if is_cancelled:
            self._cancel_job(request.id)
        self.on_changed()

    def waiting(self) -> int:
        """Requests that do not run yet, those included that the engine thread has not seen because a step takes long."""
        return sum(entry.job.stage in (Stage.QUEUED, Stage.RESOLVING, Stage.PLACING) for entry in self.open.values())

    def _check_queue(self, request: Request) -> None:
        if len(self.open) >= self.max_queue and request.id not in self.open:
            raise Overloaded(
                f"{len(self.open)} requests wait for this model",
                hint="send fewer at once, or raise limits.max_queue_per_model",
            )

    def salt(self, request: Request) -> bytes:
        """What separates this caller's cache from others': the runtime's own salt and the tenant the router named."""
        tenant = codec.decode(request.route, protocol.Route).tenant if request.route else ""
        own = str(self.actor.boot.settings.get("cache", {}).get("salt", ""))
        return f"{own}\0{tenant}".encode() if own or tenant else b""

    async def _prompt(self, spec: Complete) -> list[int]:
        if spec.mode not in ("complete", "continue", "prefill"):
            raise InvalidArgument(f"mode is {spec.mode!r}", hint="use complete, continue or prefill")
        if spec.on_full not in ("block", "error"):
            raise InvalidArgument(f"on_full is {spec.on_full!r}", hint='use "block" or "error"')
        if (reason := self._why_it_cannot_compute()) is not None:
            raise NotSupported(f"model {self.cache.model_id!r} {reason}")
        prompt = spec.prompt
        if spec.messages is not None:
            text = await self.render_chat(spec)
            tokens = await self.tokens_of(text, add_special=False, parse_special=True)
        elif isinstance(prompt, list):
            tokens = list(prompt)
        else:
            tokens = await self.tokens_of(
                prompt.encode() if isinstance(prompt, str) else prompt,
                add_special=spec.mode != "continue", parse_special=spec.parse_special,
            )  # fmt: skip
        if tokens or spec.mode != "continue":
            self.check_prompt(tokens)
        return tokens

    def _why_it_cannot_compute(self) -> str | None:
        if self.engine.info.vocab_only:
            return "was loaded with model_opts.vocab_only: it tokenizes and nothing else"
        return "makes embeddings and cannot generate" if self.engine.info.embeddings_only else None

    def check_prompt(self, tokens: list[int]) -> None:
        """Refuse what no model can read: nothing, or ids outside the vocabulary."""
        if not tokens:
            raise InvalidArgument("the prompt is empty", hint="send at least one token")
        self._check_ids("prompt", tokens)

    def _check_ids(self, name: str, tokens: list[int]) -> None:
        n_vocab = self.engine.info.n_vocab
        if tokens and not 0 <= min(tokens) <= max(tokens) < n_vocab:
            wrong = next(token for token in tokens if not 0 <= token < n_vocab)
            raise InvalidArgument(f"{name} has token id {wrong}, the vocabulary has {n_vocab}")

    async def tokens_of(self, text: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text that may fit the context; larger ones are refused before they are tokenised."""
        if len(text) > protocol.MAX_TEXT_BYTES:
            raise InvalidArgument(f"a text of {len(text)} bytes, the limit is {protocol.MAX_TEXT_BYTES}")
        if not text:
            return []  # not even the tokens that would begin it
        n_ctx = self.engine.info.n_ctx

        def tokenize() -> list[int]:
            # A token is a byte at least, so only a long text makes the engine look for its longest piece.
            if len(text) > n_ctx and len(text) > n_ctx * (self.engine.longest_piece_bytes() or MAX_BYTES_PER_TOKEN):
                raise ContextOverflow(
                    f"a text of {len(text)} bytes cannot fit in n_ctx = {n_ctx} tokens",
                    hint="shorten it, or load the model with a larger context_opts.n_ctx",
                )
            return self.engine.tokenize(text, add_special=add_special, parse_special=parse_special)

        return tokenize() if len(text) < min(4096, n_ctx) else await asyncio.to_thread(tokenize)

    def _job(self, spec: Complete, request: Request, prompt: list[int], salt: bytes) -> Job:
        n_ctx = self.engine.info.n_ctx
        room = n_ctx - len(prompt)
        if room < (0 if spec.mode == "prefill" else 1):
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens, n_ctx is {n_ctx}",
                hint="shorten it, or load the model with a larger context_opts.n_ctx",
            )
        resume = spec.resume
        seed = resume.seed if resume and resume.seed is not None else spec.sampling.seed
        scanner = Scanner(tuple(stop.encode() for stop in spec.stop_sequences if stop), self.markers, spec.thinking)
        limit = (
            0 if spec.mode == "prefill" else room if spec.response_tokens is None else min(room, spec.response_tokens)
        )
        delivered = list(resume.token_ids) if resume else []
        self._check_ids("resume", delivered)
        if len(delivered) > limit:
            raise InvalidArgument(f"resume has {len(delivered)} tokens, no more than {limit} can have been delivered")
        return Job(
            id=request.id, spec=spec, prompt=prompt, salt=salt,
            seed=secrets.randbits(32) if seed is None else seed,
            limit_tokens=limit, scanner=scanner, times=Times(time.monotonic()),
            attempt=resume.attempt if resume else 0, generated=delivered,
        )  # fmt: skip

    def _cancel(self, message: protocol.Cancel, _request: Request) -> None:
        self._cancel_job(message.request_id)

    def _cancel_job(self, request_id: str) -> None:
        if request_id in self._arriving:
            self._cancelled_early.add(request_id)
        self.scheduler.post(lambda: self.scheduler.cancel(request_id))

    def _credit(self, message: protocol.Credit, _request: Request) -> None:
        if (entry := self.open.get(message.request_id)) is not None:
            entry.stream.grant(message.events, time.monotonic())

    def _gone(self, message: protocol.Gone, _request: Request) -> None:
        for request in self._requests():
            if request.route and codec.decode(request.route, protocol.Route).client == message.client:
                self._cancel_job(request.id)

    def _requests(self) -> list[Request]:
        return [*self._arriving.values(), *(entry.request for entry in self.open.values())]

    def peer_down(self, peer_id: str) -> None:
        """A router died: the requests that came through it end, with their finish save."""
        if peer_id == "router":
            for request in self._requests():
                if request.route:
                    self._cancel_job(request.id)

    def _drop(self, entry: _Open) -> None:
        """A newer attempt took this one's place: nobody waits for its answer."""
        entry.request.ended = True
        self.open.pop(entry.job.id, None)
        self._cancel_job(entry.job.id)

    def _progress(self) -> None:
        self._outbox.deliver()  # what has waited for a wake-up that did not come
        for position, entry in enumerate(list(self.open.values())):
            job = entry.job
            held = len(self.scheduler.table[job.seq].tokens) if job.seq is not None else 0
            if not entry.request.credit:
                continue
            try:
                entry.request.event(
                    "progress",
                    protocol.Progress(
                        phase=job.stage.value, done_tokens=min(held, job.prompt_tokens or held),
                        total_tokens=job.prompt_tokens or len(job.prompt), position=position if job.seq is None else 0,
                    ),
                )  # fmt: skip
            except Unreachable:
                self._cancel_job(job.id)

    # --- Effects: called on the engine thread

    def _pump_streams(self) -> float:
        """Send what is due; returns when the next stream that has begun may send again. On the loop."""
        now_s = time.monotonic()
        for entry in list(self.open.values()):
            entry.stream.pump(now_s)
        return min((e.stream.next_s for e in self.open.values() if e.stream.next_s and e.stream.can_send), default=0.0)

    def resolve(self, job: Job, live_tokens: int) -> None:
        """Look a prompt up, then hand what was found to the scheduler."""
        self._outbox.put(lambda: self.actor.spawn(self._resolve(job, live_tokens)))

    async def _resolve(self, job: Job, live_tokens: int) -> None:
        found = await self.cache.find(job, live_tokens)
        self.scheduler.post(lambda: self.scheduler.resolved(job, found))

    def check_in(self, found: Found, used: Sequence[StoredNode], corrupt: Sequence[StoredNode]) -> None:
        """Drop the claim."""
        self._outbox.put_along(lambda: self.cache.check_in(found, used, corrupt))

    def save(self, order: SaveOrder) -> None:
        """Store a prefix."""
        self._outbox.put(lambda: self._save(order))

    def _save(self, order: SaveOrder) -> None:
        accepted: asyncio.Future[SaveResult] = self.actor.loop.create_future()
        entry = self.open.get(order.job.id) if order.job else None
        if entry is not None:
            entry.saves.append(accepted)
        self._note(self._saving, self.actor.spawn(self.cache.save(order, accepted)))

    def _note(self, tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def emit(self, job: Job, pieces: Sequence[Piece]) -> None:
        """Stream to the caller; the first pieces and the last ones at once."""
        is_last = job.finish_reason is not None

        def push() -> None:
            entry = self.open.get(job.id)
            if entry is not None and entry.job is job:
                if is_last:
                    entry.stream.hurry()
                entry.stream.push(pieces, time.monotonic())

        if job.has_emitted and not is_last:
            self._outbox.put_for_later(push)
            return
        self._outbox.put(push)
        if not job.has_emitted:
            job.has_emitted = True
            time.sleep(FIRST_EVENT_S)

    def ended(self, job: Job, context: tuple[int, ...]) -> None:
        """The request is over."""
        self._outbox.put(lambda: self._begin_end(job, context))

    def _begin_end(self, job: Job, context: tuple[int, ...]) -> None:
        self._note(self._ending, self.actor.spawn(self._ended(job, context)))

    def computes(self, job: Job) -> None:
        """Note it where the router can read it when we are dead."""
        self.recorder.computes(job.id)

    def rests(self, job: Job) -> None:
        """Take the note back."""
        self.recorder.rests(job.id)

    def changed(self) -> None:
        """Observers' row has changed."""
        self._outbox.put_along(self.on_changed)

    def crashed(self, error: BaseException) -> None:
        """The engine thread has a bug."""
        self.actor.crash(error)

    # --- the end of a request

    async def _ended(self, job: Job, context: tuple[int, ...]) -> None:
        entry = self.open.get(job.id)
        if entry is None or entry.job is not job:
            return
        if entry.timer:
            entry.timer.cancel()
        results = await self._accepted(entry)
        finish_key = next((r.key for r in results if r.reason is SaveReason.FINISH), None)
        created = sum(result.created_tokens for result in results)
        counted = protocol.Counted(deltas=self._counts(job))
        body = reporting.completed(job, context, finish_key, created)

        def finish() -> None:
            self.open.pop(job.id, None)
            stats = reporting.statistics(job, body, time.time())
            self.actor.log.info("request.ended", request=job.id, **stats)
            # By the way of the answer: who has that finds rows and counters up to date.
            entry.request.cast(self.row())
            entry.request.cast(protocol.RequestEnded(model_id=self.cache.model_id, request_id=job.id, stats=stats))
            entry.request.cast(counted)
            if job.error is not None:
                entry.request.error(job.error)
            else:
                entry.request.done(body)

        entry.stream.end(finish, time.monotonic())
        if self.on_first_end is not None and job.error is None:
            self.on_first_end()
            self.on_first_end = None

    async def _accepted(self, entry: _Open) -> list[SaveResult]:
        if not entry.saves:
            return []
        done, _ = await asyncio.wait(entry.saves, timeout=ACCEPT_DEADLINE_S)
        return [future.result() for future in done]

    def _counts(self, job: Job) -> dict[str, int]:
        """What an ended request adds to the counters."""
        work = {"tokens_prefilled": self._take_prefilled(), "load_total_ns": job.load_ns}
        if job.seq is None or job.error is not None:
            return work
        hit = job.hit
        self.last_hit = {"kind": hit.kind.value, "prefix_tokens": hit.read_tokens}
        name = _HIT_COUNTERS.get(hit.kind)
        if hit.kind is HitKind.PARTIAL:
            sticky = job.spec.session_id is not None and hit.source == "live"
            name = "hits_sticky_partial" if sticky else "hits_resume" if hit.via == "parent" else "hits_longest_prefix"
        deltas = {name or "misses": 1, "tokens_reused": hit.read_tokens}
        if hit.source == "live":
            deltas["hits_live"] = 1
        self.on_changed()
        return deltas | work

    def _take_prefilled(self) -> int:
        total = self.scheduler.prefilled_tokens  # the engine thread only adds to it
        new, self._counted_prefilled = total - self._counted_prefilled, total
        return new

    def stop(self) -> None:
        """Take no more requests."""
        self._is_stopping = True

    async def saves(self) -> None:
        """Wait for the saves under way: what they hold must be with a writer or a tier before our memory goes."""
        if self._saving:
            await asyncio.wait(self._saving)

    async def close(self) -> None:
        """Stopping, and the engine has ended every request: let each caller have its end, whether it reads or not."""
        for entry in list(self.open.values()):
            entry.stream.last_call(time.monotonic())
        if self._ending:
            await asyncio.wait(self._ending, timeout=ACCEPT_DEADLINE_S)
        for entry in list(self.open.values()):  # the engine did not come to them in time
            entry.request.error(InternalError("the model process stopped before the request ended"))
        self.open.clear()
