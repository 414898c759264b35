"""The engine thread: everything that touches the context, one turn after another.

A turn: take commands, place waiting requests, restore and export for a few milliseconds, decode one batch, sample, send.
The I/O thread never touches the engine; it posts calls here (`post`) and gets its answers through `Effects`.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass

from barrel_inference.errors import (
    BarrelError,
    ContextOverflow,
    DeadlineExceeded,
    DecodeFailed,
    DecodeTimeout,
    GrammarFailed,
    NoSession,
    SeqCapacity,
    StickyBusy,
    TranscriptMismatch,
)
from barrel_inference.protocol import HitKind, Phase, SaveReason
from barrel_inference.tiers.policy import Policy
from barrel_inference.workers.model import batch
from barrel_inference.workers.model.chain import NO_SEAM, common_prefix
from barrel_inference.workers.model.context import Context
from barrel_inference.workers.model.effects import Effects, Found, SaveOrder, StoredNode
from barrel_inference.workers.model.engine import Engine, NoCells, Row, StepFailed, StepInterrupted
from barrel_inference.workers.model.job import Job, Stage
from barrel_inference.workers.model.placement import Abilities, How, Placement, hit_kind, place
from barrel_inference.workers.model.restore import Restore, let_go, live_part
from barrel_inference.workers.model.sequences import Sequence_, Use
from barrel_inference.workers.model.text import Piece, undelivered

# Restores and exports do at most this much per turn while others decode.
CHORE_BUDGET_S = 0.005

# A read that takes longer leaves room for commands: a cancel, another request.
READ_WAIT_S = 0.02


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler was told at load."""

    policy: Policy
    prefill_chunk: int
    warm_cells: int
    deterministic: bool
    block_tokens: int
    decode_budget_ms: int = 0
    max_queue: int = 1024


class Scheduler:
    """The state of one model. Its public methods, except `post` and `start`, run on the engine thread only."""

    def __init__(self, engine: Engine, effects: Effects, limits: Limits) -> None:
        self.engine = engine
        self.effects = effects
        self.limits = limits
        self.context = Context(engine)
        self.table = self.context.table
        self.waiting: list[Job] = []  # queued, resolving, placing; in order of arrival
        self.running: dict[int, Job] = {}  # by sequence
        self.found: dict[str, Found] = {}  # by request, until it is placed
        self.active_sessions: set[tuple[str, bytes]] = set()
        self.restores: dict[int, Restore] = {}
        self.reclaiming: set[int] = set()
        self.prefilled_tokens = 0
        self.call_began_s = 0.0  # read by the I/O thread: inside a decode call since then; 0 = in none
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._chores: deque[Callable[[], None]] = deque()
        self._able = Abilities(
            can_share=not engine.info.needs_snapshot and engine.info.has_cells and not limits.deterministic,
            can_cut=engine.can_cut,
            min_reuse_tokens=limits.policy.min_reuse_tokens,
        )
        self._turn = 0
        self._stopped = False
        self._paused = False
        self._when_idle: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- from the I/O thread

    def start(self) -> None:
        """Begin to turn."""
        self._thread.start()

    def post(self, command: Callable[[], None]) -> None:
        """Run a call on the engine thread at the next turn."""
        self._inbox.put(command)

    def post_chore(self, chore: Callable[[], None]) -> None:
        """Run an export or the like between decode calls, within the budget for such work."""
        self._inbox.put(lambda: self._chores.append(chore))

    def stop(self) -> None:
        """Leave the loop after this turn."""
        self.post(self._set_stopped)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout_s)

    def _set_stopped(self) -> None:
        self._stopped = True

    # --- commands

    def submit(self, job: Job) -> None:
        """Take a request in, or refuse it."""
        spec = job.spec
        if spec.session_id and (spec.session_id, job.salt) in self.active_sessions:
            self._refuse(
                job,
                StickyBusy(
                    f"session {spec.session_id!r} already has a request in flight",
                    hint="wait for it to finish, or start another session",
                ),
            )
            return
        if spec.mode == "continue" and not self._take_session_context(job):
            return
        if spec.on_full == "error" and (self.waiting or not self._could_start(job)):
            self._refuse(
                job,
                SeqCapacity(
                    f"all {len(self.table.sequences)} sequences are in use",
                    hint='try again, use on_full="block", or load the model with a larger context_opts.n_seq_max',
                ),
            )
            return
        if spec.session_id:
            self.active_sessions.add((spec.session_id, job.salt))
        self.waiting.append(job)
        self.effects.changed()

    def resolved(self, job: Job, found: Found) -> None:
        """The index has answered for a waiting request."""
        if job.stage is not Stage.RESOLVING:
            let_go(found)
            self.effects.check_in(found, (), ())
            return
        self.found[job.id] = found
        job.stage = Stage.PLACING

    def cancel(self, request_id: str) -> None:
        """End a request; unknown ids are fine."""
        for job in [*self.waiting, *self.running.values()]:
            if job.id == request_id:
                job.cancelled = True
                self._end(job, "cancelled")

    def expire(self, request_id: str) -> None:
        """End a request whose deadline has passed."""
        for job in [*self.waiting, *self.running.values()]:
            if job.id == request_id:
                self._end(job, None, DeadlineExceeded("the deadline passed", hint="allow more time: deadline_s"))

    def end_session(self, session: str, salt: bytes, *, reset: bool) -> BarrelError | None:
        """Release a session's sequence; the cells stay warm. Returns why not."""
        key = (session, salt)
        own = self.table.of_session(session, salt)
        if key in self.active_sessions:
            if not reset:
                return StickyBusy(f"session {session!r} has a request in flight", hint="cancel it, or wait for it")
            for job in [*self.waiting, *self.running.values()]:
                if job.spec.session_id == session and job.salt == salt:
                    job.cancelled = True
                    self._end(job, "cancelled")
            own = self.table.of_session(session, salt)
        elif own is None:
            return NoSession(f"no session {session!r}", hint="it was never started, was ended, or was reclaimed")
        if own is not None:
            own.session = None
            own.use = Use.WARM if own.tokens else Use.FREE
        self.effects.changed()
        return None

    def save_packed(self, seq: int) -> None:
        """An export of this sequence needs its cells no longer."""
        self.table[seq].holds -= 1

    def save_published(self, order: SaveOrder) -> None:
        """Every node of a save is published, or was given up."""
        if order.on_published:
            order.on_published()

    def release_idle(self, done: Callable[[int], None]) -> None:
        """Save idle sessions, then free every idle sequence; `done` gets how many were freed."""
        pinned = [s for s in self.table.sequences if s.use is Use.PINNED]
        for own in pinned:
            self._reclaim(own)

        def finish() -> None:
            freed = 0
            for s in self.table.sequences:
                if s.use is Use.WARM and not s.holds:
                    self.context.clear(s)
                    freed += 1
            done(freed + len(pinned))

        self._after_reclaim(finish)

    def save_everything(self, done: Callable[[int], None]) -> None:
        """Shutdown: end what runs, then save every sequence that holds unsaved tokens, the most valuable first;
        `done` gets their number."""
        for job in [*self.waiting, *self.running.values()]:
            job.cancelled = True
            self._end(job, "cancelled")
        worth = sorted(
            (s for s in self.table.sequences if s.tokens),
            key=lambda s: (s.session is not None, len(s.tokens) - s.saved_tokens),
            reverse=True,
        )
        left = len(worth)

        def one_done() -> None:
            nonlocal left
            left -= 1
            if not left:
                done(len(worth))

        for s in worth:
            if not self._save(s, len(s.tokens), SaveReason.SHUTDOWN, on_published=one_done):
                one_done()
        if not worth:
            done(0)

    def pause(self, then: Callable[[], None]) -> None:
        """Start no further request; run `then` once none runs. They go on after `resume`."""
        self._paused = True
        self._when_idle.append(then)

    def resume(self) -> None:
        """Let waiting requests start again."""
        self._paused = bool(self._when_idle)

    # --- the loop

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._take_commands()
                self._do_chores()
                self._become_idle()
                self._place_waiting()
                self._restore_some()
                self._step()
        except BaseException as bug:  # the thread's top: the process must not go on without its engine
            self.effects.crashed(bug)

    def _take_commands(self) -> None:
        if not self._can_work():
            self._inbox.get()()
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            command()

    def _can_work(self) -> bool:
        if self._chores or self.restores or self._stopped:
            return True
        if any(job.stage in (Stage.PREFILLING, Stage.GENERATING) for job in self.running.values()):
            return True
        if self._when_idle and self._is_idle():
            return True
        return any(self._is_due(job) for job in self.waiting)

    def _is_due(self, job: Job) -> bool:
        """Would another turn move this waiting request? Everything else that could is announced by a command."""
        if job.stage is Stage.QUEUED:
            return not self._paused and self._could_start(job)
        return job.stage is Stage.PLACING and self._decide(job).how not in (How.WAIT, How.FOLLOW)

    def _do_chores(self) -> None:
        end_s = time.perf_counter() + CHORE_BUDGET_S
        while self._chores:
            self._chores.popleft()()
            if self.running and time.perf_counter() > end_s:
                return

    def _become_idle(self) -> None:
        if self._when_idle and self._is_idle():
            then, self._when_idle = self._when_idle, []
            for function in then:
                function()

    def _is_idle(self) -> bool:
        return not self.running and all(job.stage is Stage.QUEUED for job in self.waiting)

    # --- admission and placement

    def _could_start(self, job: Job) -> bool:
        others = [*self.running.values(), *(j for j in self.waiting if j.stage is not Stage.QUEUED)]
        if others and (self.limits.deterministic or job.is_suspect or any(other.is_suspect for other in others)):
            return False
        under_way = sum(j.stage in (Stage.RESOLVING, Stage.PLACING) for j in self.waiting)
        if job.spec.session_id and self.table.of_session(job.spec.session_id, job.salt):
            return True
        return under_way < self.table.available()

    def _place_waiting(self) -> None:
        for job in list(self.waiting):
            if job.stage is Stage.QUEUED:
                if self._paused or not self._could_start(job):
                    break  # first come, first served
                job.times.admitted_s = time.monotonic()
                job.stage = Stage.RESOLVING
                if self._lookup_is_useless(job):
                    self.resolved(job, Found(miss_reason=self._miss_without_lookup(job)))
                else:
                    self.effects.resolve(job)
            if job.stage is Stage.PLACING:
                self._place(job)
                if job.stage is Stage.PLACING and self._decide(job).how is not How.FOLLOW:
                    break  # it waits for a sequence: nobody overtakes it

    def _lookup_is_useless(self, job: Job) -> bool:
        if not self.engine.info.cacheable or job.spec.mode == "continue":
            return True
        live = self.table.best_live([*job.prompt, *job.generated], job.salt, self.engine.rendered)
        return (
            self._able.can_share
            and live is not None
            and live.seam.caller_tokens == len(job.prompt) + len(job.generated)
        )

    def _miss_without_lookup(self, job: Job) -> str | None:
        return None if self.engine.info.cacheable else "memory_kind"

    def _decide(self, job: Job) -> Placement:
        stored = self.found[job.id].seam.caller_tokens if job.id in self.found else 0
        return place(job, self.table, list(self.running.values()), self.engine.rendered, stored, self._able)

    def _place(self, job: Job) -> None:
        if self.limits.deterministic and not self._stand_alone(job):
            return
        decision = self._decide(job)
        if decision.how in (How.WAIT, How.FOLLOW):
            return
        if decision.how is How.RECLAIM:
            own = self.table.oldest_pinned()
            if own is not None:
                self._reclaim(own)
            return
        assert decision.target is not None
        self.waiting.remove(job)
        found = self.found.pop(job.id)
        self._occupy(job, decision, found)
        self.effects.changed()

    def _stand_alone(self, job: Job) -> bool:
        """Deterministic: no other sequence holds cells while one computes. False: an idle one is being saved first."""
        own = self.table.of_session(job.spec.session_id, job.salt) if job.spec.session_id else None
        for s in self.table.sequences:
            if s is own or not s.tokens or s.use is Use.BUSY:
                continue
            if s.use is Use.PINNED:
                self._reclaim(s)
                return False
            if s.holds:
                return False
            self.context.clear(s)
        return True

    def _occupy(self, job: Job, decision: Placement, found: Found) -> None:
        """Give a request its sequence, with what the sequence is to hold of the prompt already."""
        self.effects.computes(job)
        s = self.table[decision.target or 0]
        wanted = [*job.prompt, *job.generated]
        if decision.stored:
            self.context.cut(s, live_part(self.context, s, found))
            job.begin_context((), wanted)
        else:
            self._reuse_live(job, s, decision, found, wanted)
        s.use, s.salt = Use.BUSY, job.salt
        if job.spec.session_id:
            s.session = job.spec.session_id
        self.table.touch(s.id)
        job.seq = s.id
        self.running[s.id] = job
        if decision.stored:
            job.stage = Stage.RESTORING
            self.restores[s.id] = Restore(
                self.context, self.effects, job, s, found,
                min_reuse_tokens=self._able.min_reuse_tokens, then=lambda: self._restored(job),
            )  # fmt: skip
        else:
            let_go(found)
            self.effects.check_in(found, (), ())
            self._restored(job)

    def _reuse_live(self, job: Job, s: Sequence_, decision: Placement, found: Found, wanted: list[int]) -> None:
        seam, held_before = decision.seam, len(s.tokens)
        if decision.how is How.SHARE and not self.context.share(
            self.table[decision.source or 0], s, seam.stored_tokens
        ):
            seam = NO_SEAM
        elif decision.how is How.CLEAR:
            self.context.clear(s)
        job.begin_context(s.tokens[: seam.stored_tokens], wanted[seam.caller_tokens :])
        # The last token is computed again, for its logits.
        keep = min(seam.stored_tokens, len(job.tokens) - 1)
        if keep < len(s.tokens) and not self.context.cut(s, keep):
            job.begin_context((), wanted)
            seam = NO_SEAM
        reused = seam.stored_tokens
        job.hit.kind = hit_kind(decision, reused, job.prompt_tokens, held_before)
        if job.spec.mode == "continue":
            job.hit.kind = HitKind.CONTINUATION
        job.hit.read_tokens, job.hit.retokenised = reused, seam.retokenised
        job.hit.source = "live" if reused else None
        job.hit.miss_reason = found.miss_reason if not reused else None
        job.hit.divergence_byte = found.divergence_byte

    # --- restoring

    def _restore_some(self) -> None:
        """Import nodes, for a few milliseconds if others compute; alone, wait for what is still being read."""
        end_s = time.perf_counter() + CHORE_BUDGET_S
        others = any(job.stage in (Stage.PREFILLING, Stage.GENERATING) for job in self.running.values())
        for seq, restore in list(self.restores.items()):
            while restore.step():
                if restore.awaited is not None:
                    if others or len(self.restores) > 1:
                        break
                    wait([restore.awaited], READ_WAIT_S)
                    break
                if others and time.perf_counter() > end_s:
                    return
            else:
                self.restores.pop(seq, None)

    def _restored(self, job: Job) -> None:
        job.times.restored_s = time.monotonic()
        job.stage = Stage.PREFILLING
        try:
            if job.sampler is None and job.spec.mode != "prefill":
                job.sampler = self.engine.new_sampler(
                    job.spec.sampling, seed=job.seed, prompt=job.tokens[: job.prompt_tokens]
                )
                self._replay(job)
        except BarrelError as refused:
            self._end(job, None, refused)

    def _replay(self, job: Job) -> None:
        """A resubmission: what was delivered counts as generated, through sampler, stops, spans and limits.

        Nothing is sent again; what a delivered token had still to say when the connection broke is sent now.
        """
        resume = job.spec.resume
        if resume is None:
            return
        pieces: list[Piece] = []
        for number, token in enumerate(job.generated):
            assert job.sampler is not None
            job.sampler.accept(token, number)
            if job.spec.sampling.logprobs:  # what the others were is lost with the process that knew
                job.logprobs.append({"id": token, "top": []})
            is_forced = bool(job.forced)
            del job.forced[:1]
            pieces += self._hear(job, token, number + 1, is_forced=is_forced)
        rest = undelivered(pieces, resume.text_bytes, resume.span_ends)
        if rest:
            self.effects.emit(job, rest)

    # --- one decode call

    def _step(self) -> None:
        jobs = [job for job in self.running.values() if job.stage in (Stage.PREFILLING, Stage.GENERATING)]
        if not jobs:
            return
        wants = [self._want(job) for job in jobs]
        deciding = any(not want.prefill for want in wants)
        chunk = (
            self.limits.prefill_chunk if deciding or len(jobs) > 1 or self.limits.deterministic else self._lone_chunk()
        )
        self._turn += 1
        parts = batch.plan(wants, n_batch=self.engine.info.n_batch, chunk=chunk, first=self._turn)
        try:
            self._decode(parts)
        except NoCells:
            self._make_room(parts)
        except StepInterrupted as stopped:
            self._after_interrupt(parts, stopped)
        except StepFailed as failed:
            self._after_failure(parts, failed)

    def _lone_chunk(self) -> int:
        # Alone, a longer slice costs nobody anything; not the whole batch, so that a cancel or a newcomer waits little.
        return max(self.limits.prefill_chunk, min(self.engine.info.n_batch, 256))

    def _want(self, job: Job) -> batch.Want:
        assert job.seq is not None
        held = len(self.table[job.seq].tokens)
        ready = len(job.tokens) - held
        prefill = max(0, job.prompt_tokens - 1 - held)
        if not prefill and ready > 1 and not self.limits.deterministic:
            prefill = ready - 1  # tokens generated before a restart: a slice is faster than one by one
        for point in self._snapshot_points(job):
            if held < point < held + prefill:
                prefill = point - held
        return batch.Want(job.seq, held, ready, prefill)

    def _decode(self, parts: list[batch.Slice]) -> None:
        rows: list[Row] = []
        with_logits: list[tuple[Job, int]] = []
        for part in parts:
            job = self.running[part.seq]
            end = part.position + part.count
            for position in range(part.position, end):
                rows.append(Row(job.tokens[position], position, part.seq, False))
            if end == len(job.tokens) and job.finish_reason is None and job.spec.mode != "prefill":
                rows[-1] = rows[-1]._replace(wants_logits=True)
                with_logits.append((job, len(rows) - 1))
        self.call_began_s = time.monotonic()
        try:
            self.engine.decode(rows)
        finally:
            self.call_began_s = 0.0
        for part in parts:
            self._advance(part)
        for job, row in with_logits:
            if job.stage is not Stage.ENDED:
                self._sample(job, row)
        for part in parts:
            if part.seq in self.running:
                self._after_row(self.running[part.seq])

    def _advance(self, part: batch.Slice) -> None:
        job, s = self.running[part.seq], self.table[part.seq]
        end = part.position + part.count
        s.tokens += job.tokens[part.position : end]
        job.fresh_restore = ()
        new_prompt = max(0, min(end, job.prompt_tokens) - part.position)
        self.prefilled_tokens += new_prompt
        if end in self._snapshot_points(job) or end == len(job.tokens):
            self.context.take_snapshot(s)

    def _after_row(self, job: Job) -> None:
        assert job.seq is not None
        s = self.table[job.seq]
        held = len(s.tokens)
        if job.stage is Stage.PREFILLING and held >= job.prompt_tokens:
            job.stage = Stage.GENERATING
            job.times.prefilled_s = time.monotonic()
            self.effects.changed()
        self._save_prompt(job, s, held)
        if job.spec.mode == "prefill" and held == len(job.tokens):
            job.times.prefilled_s = job.times.prefilled_s or time.monotonic()
            self._end(job, "length")
        elif job.finish_reason is not None and held >= len(job.tokens) - self.limits.deterministic:
            self._end(job, job.finish_reason)
        elif (
            self.limits.policy.wants_continued(held, max(s.saved_tokens, job.prompt_tokens))
            and not self.limits.deterministic
        ):
            self._save(s, held, SaveReason.CONTINUED, job=job)

    def _sample(self, job: Job, row: int) -> None:
        assert job.sampler is not None
        number = len(job.generated)
        if number >= job.limit_tokens:
            job.finish_reason = "length"
            return
        is_forced = bool(job.forced)
        try:
            if is_forced:
                token = job.forced.pop(0)
                job.sampler.accept(token, number)
            else:
                if job.spec.sampling.logprobs:
                    top = job.sampler.top_logprobs(row, job.spec.sampling.logprobs)
                    job.logprobs.append({"top": [{"id": t, "logprob": p} for t, p in top]})
                token = job.sampler.sample(row, number)
                if job.spec.sampling.logprobs:
                    job.logprobs[-1]["id"] = token
        except GrammarFailed as failed:
            self._end(job, None, failed)
            return
        if not job.times.first_token_s:
            job.times.first_token_s = time.monotonic()
            if job.stage is Stage.PREFILLING:
                job.stage = Stage.GENERATING
                job.times.prefilled_s = job.times.first_token_s
                self.effects.changed()
        if self.engine.is_end(token):
            if job.logprobs:
                job.logprobs.pop()
            job.finish_reason = "stop"
            return
        job.generated.append(token)
        job.tokens.append(token)
        pieces = self._hear(job, token, number + 1, is_forced=is_forced)
        if pieces:
            self.effects.emit(job, pieces)

    def _hear(self, job: Job, token: int, count: int, *, is_forced: bool) -> list[Piece]:
        """What the `count`-th generated token says, and whether the reply ends with it."""
        # A forced token closes a span that is closed already: the caller has been told, and sees no marker in the text.
        pieces = job.scanner.feed(token, b"" if is_forced else self.visible(token, job))
        budget = job.spec.thinking_budget_tokens
        if budget is not None and job.scanner.span == "thinking" and job.scanner.thinking_tokens >= budget:
            pieces += job.scanner.close_thinking()
            closing = job.scanner.markers.thinking
            if closing:  # the model has to see that it has stopped thinking
                job.forced = self.engine.tokenize(closing[1], add_special=False, parse_special=True)
        if job.scanner.stopped_by is not None:
            job.finish_reason = "stop"
        elif count >= job.limit_tokens:
            job.finish_reason = "length"
        return pieces

    def visible(self, token: int, job: Job) -> bytes:
        """A token's bytes for the scanner: its text, or the marker that it is."""
        text = self.engine.piece(token)
        if text:
            return text
        spelt = self.engine.special_piece(token)
        markers = job.scanner.markers
        known = [text for pair in (markers.thinking, markers.tool_call) if pair for text in pair]
        return spelt if spelt in known else b""

    # --- when a call could not be made

    def _make_room(self, parts: list[batch.Slice]) -> None:
        """Idle sequences go first; then the request admitted last is saved, freed, and resumed later."""
        if self.context.free_one_idle():
            return
        own = self.table.oldest_pinned()
        if own is not None:
            self._reclaim(own)
            return
        if self._chores or any(s.holds for s in self.table.sequences):
            self._wait_for_command()
            return
        jobs = sorted(self.running.values(), key=lambda job: job.times.admitted_s)
        if len(jobs) > 1:
            self._preempt(jobs[-1])
            return
        job = self.running[parts[0].seq]
        self._end(
            job,
            None,
            ContextOverflow(
                f"{len(job.tokens)} tokens do not fit in {self.engine.info.n_cells} KV cells",
                hint="shorten the prompt, or load the model with a larger context_opts.kv_cells",
            ),
        )

    def _wait_for_command(self) -> None:
        if not self._chores:
            self._inbox.get()()

    def _preempt(self, job: Job) -> None:
        assert job.seq is not None
        s = self.table[job.seq]
        self._leave(s)
        session = s.session
        s.session, s.use = None, Use.WARM
        self._save(s, len(s.tokens), SaveReason.EVICT, job=job)
        job.seq, job.stage = None, Stage.QUEUED
        self.waiting.insert(0, job)
        self.effects.rests(job)
        if session and job.spec.session_id:
            self.active_sessions.add((job.spec.session_id, job.salt))
        self.effects.changed()

    def _after_interrupt(self, parts: list[batch.Slice], stopped: StepInterrupted) -> None:
        """A call ran over its budget: the longest prefill in it fails; the others' rows are computed again."""
        for part in parts:
            s, length = self.table[part.seq], stopped.lengths.get(part.seq)
            job = self.running[part.seq]
            if length is None:
                self._end(job, None, self._timeout())
                self.context.clear(s)
            else:
                s.tokens = job.tokens[:length]
                self.context.cut(s, min(length, part.position))
        slowest = max(parts, key=lambda part: part.count)
        if slowest.seq in self.running:
            self._end(self.running[slowest.seq], None, self._timeout())

    def _timeout(self) -> DecodeTimeout:
        return DecodeTimeout(
            f"one step took longer than decode_budget_ms = {self.limits.decode_budget_ms}",
            hint="send it again, or load the model with a larger context_opts.decode_budget_ms",
        )

    def _after_failure(self, parts: list[batch.Slice], failed: StepFailed) -> None:
        """One row is bad: try each sequence by itself; the one that fails ends, or goes on cold if it was just restored."""
        if len(parts) > 1:
            for part in parts:
                if part.seq in self.running:
                    try:
                        self._decode([part])
                    except StepFailed as again:
                        self._after_failure([part], again)
            return
        job = self.running[parts[0].seq]
        s = self.table[parts[0].seq]
        if job.fresh_restore:
            self.effects.check_in(Found(), (), tuple(_bad_copy(key, server) for key, server in job.fresh_restore))
            job.fresh_restore = ()
            self.context.clear(s)
            wanted = [*job.prompt, *job.generated]
            job.begin_context((), wanted)
            job.hit.kind, job.hit.read_tokens, job.hit.source = HitKind.COLD, 0, None
            job.hit.miss_reason = "unreadable"
            return
        self._end(
            job,
            None,
            DecodeFailed(f"llama.cpp refused a step of this request (code {failed.code})", llama_code=failed.code),
        )
        self.context.clear(s)

    # --- ends and saves

    def _refuse(self, job: Job, error: BarrelError) -> None:
        job.error, job.stage = error, Stage.ENDED
        job.times.ended_s = time.monotonic()
        self.effects.ended(job, ())

    def _end(self, job: Job, reason: str | None, error: BarrelError | None = None) -> None:
        """End a request wherever it stands; its sequence stays warm, or pinned to its session."""
        if job.stage is Stage.ENDED:
            return
        job.finish_reason, job.error = reason, error
        was_waiting = job in self.waiting
        job.stage = Stage.ENDED
        job.times.ended_s = time.monotonic()
        if job.spec.session_id:
            self.active_sessions.discard((job.spec.session_id, job.salt))
        context: tuple[int, ...] = ()
        if was_waiting:
            self.waiting.remove(job)
            if (found := self.found.pop(job.id, None)) is not None:
                let_go(found)
                self.effects.check_in(found, (), ())
        elif job.seq is not None:
            context = self._release(job)
        pieces = job.scanner.finish()
        if pieces and error is None:
            self.effects.emit(job, pieces)
        if job.sampler is not None:
            job.sampler.close()
            job.sampler = None
        self.effects.rests(job)
        self.effects.ended(job, context)
        self.effects.changed()

    def _release(self, job: Job) -> tuple[int, ...]:
        assert job.seq is not None
        s = self.table[job.seq]
        self._leave(s)
        self.table.touch(s.id)
        s.use = Use.PINNED if job.spec.session_id and s.tokens else Use.WARM if s.tokens else Use.FREE
        if s.use is not Use.PINNED:
            s.session = None
        n = min(len(s.tokens), job.prompt_tokens) if self.limits.deterministic else len(s.tokens)
        if job.error is None and self.limits.policy.wants_finish(n):
            self._save(s, n, SaveReason.FINISH, job=job)
        context = tuple(s.tokens)
        self._bound_warm()
        return context

    def _leave(self, s: Sequence_) -> None:
        """The request stops running on this sequence, in the middle of a restore too."""
        del self.running[s.id]
        if (restore := self.restores.pop(s.id, None)) is not None:
            restore.close()

    def _bound_warm(self) -> None:
        """Idle cells slow every token of the others: keep at most `warm_cells` of them."""
        warm = sorted((s for s in self.table.sequences if s.use is Use.WARM), key=lambda s: s.used)
        total = sum(len(s.tokens) for s in warm)
        for s in warm[:-1] if len(warm) > 1 else []:
            if total <= self.limits.warm_cells:
                return
            if not s.holds:
                total -= len(s.tokens)
                self.context.clear(s)

    def _save_prompt(self, job: Job, s: Sequence_, held: int) -> None:
        """The saves that belong to the prompt: the caller's static head, and the cold save; once each."""
        policy = self.limits.policy
        pin = min(job.spec.prefix_checkpoint_len or 0, job.prompt_tokens)
        if pin and not job.pin_saved and held >= pin:
            job.pin_saved = True
            self._save(s, pin, SaveReason.AGENT_PREFIX, job=job, pinned=True)
        if job.cold_saved or job.hit.kind is not HitKind.COLD or not policy.wants_cold(job.prompt_tokens):
            return
        boundary = policy.cold_boundary(job.prompt_tokens)
        if boundary and held >= boundary:
            job.cold_saved = True
            self._save(s, boundary, SaveReason.COLD, job=job)

    def _save(
        self, s: Sequence_, length: int, reason: SaveReason, *, job: Job | None = None, pinned: bool = False,
        on_published: Callable[[], None] | None = None,
    ) -> bool:  # fmt: skip
        if not self.engine.info.cacheable or not length or (length <= s.saved_tokens and reason is SaveReason.SHUTDOWN):
            return False
        snapshots = dict(self.context.snapshots.get(s.id, {}))
        if self.engine.info.needs_snapshot and length not in snapshots:
            return False
        s.holds += 1
        s.saved_tokens = max(s.saved_tokens, length)
        self.effects.save(
            SaveOrder(s.id, tuple(s.tokens[:length]), s.salt, reason, snapshots, job, pinned, on_published)
        )
        return True

    def _reclaim(self, own: Sequence_) -> None:
        """Save an idle session, then free its sequence."""
        if own.id in self.reclaiming:
            return
        self.reclaiming.add(own.id)
        if own.session is not None:
            own.session = None
        own.use = Use.WARM

        def freed() -> None:
            self.reclaiming.discard(own.id)
            if own.use is Use.WARM and not own.holds:
                self.context.clear(own)
            self.effects.changed()

        if not self._save(own, len(own.tokens), SaveReason.EVICT, on_published=freed):
            freed()

    def _after_reclaim(self, then: Callable[[], None]) -> None:
        if not self.reclaiming:
            then()
        else:
            self.post(lambda: self._after_reclaim(then))

    # --- snapshots (recurrent and hybrid models)

    def _snapshot_points(self, job: Job) -> tuple[int, ...]:
        if not self.engine.info.needs_snapshot or not self.engine.info.cacheable:
            return ()
        pin = job.spec.prefix_checkpoint_len or 0
        boundary = self.limits.policy.cold_boundary(job.prompt_tokens)
        return tuple(point for point in (pin, boundary, job.prompt_tokens - 1) if point > 0)

    # --- for observers

    def phase(self) -> Phase:
        """What the model is doing: generating wins over prefilling."""
        stages = {job.stage for job in self.running.values()}
        if Stage.GENERATING in stages:
            return Phase.GENERATING
        return Phase.PREFILLING if stages else Phase.IDLE

    def _take_session_context(self, job: Job) -> bool:
        """A continue: the context is what the session holds plus the suffix. False: refused."""
        session = job.spec.session_id or ""
        own = self.table.of_session(session, job.salt)
        if own is None or own.use is not Use.PINNED:
            self._refuse(
                job, NoSession(f"no session {session!r}", hint="start it with a whole prompt: complete(session_id=...)")
            )
            return False
        expected = job.spec.expect_committed
        if expected is not None and list(expected) != own.tokens:
            at = common_prefix(own.tokens, expected)
            self._refuse(
                job,
                TranscriptMismatch(
                    f"session {session!r} holds {len(own.tokens)} tokens, {len(expected)} were expected, they differ at {at}",
                    hint="send the whole prompt",
                    stored=len(own.tokens), expected=len(expected), diverge=at,
                ),
            )  # fmt: skip
            return False
        job.prompt = [*own.tokens, *job.prompt]
        room = self.engine.info.n_ctx - len(job.prompt)
        if room < 1:
            self._refuse(
                job,
                ContextOverflow(
                    f"session and suffix have {len(job.prompt)} tokens, n_ctx is {self.engine.info.n_ctx}",
                    hint="start a new session with a shorter prompt",
                ),
            )
            return False
        job.limit_tokens = min(job.limit_tokens, room)
        return True


def _bad_copy(key: bytes, server: str) -> StoredNode:
    return StoredNode(key, server, "", 0, 0, memoryview(b""), None, lambda: False)
