"""The engine thread: everything that touches the context, one turn after another.

A turn: take commands, place waiting requests, restore and export for a few milliseconds, decode one batch, sample, send.
The I/O thread never touches the engine; it posts calls here (`post`) and gets its answers through `Effects`.

Parts: `admission` (queue to sequence), `decoding` (one call), `recovery` (calls that failed), `saving`; they share `state`.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from barrel_inference.errors import BarrelError, DeadlineExceeded, NoSession, SeqCapacity, StickyBusy
from barrel_inference.protocol import Phase, SaveReason
from barrel_inference.workers.model import sessions
from barrel_inference.workers.model.admission import Admission
from barrel_inference.workers.model.decoding import Decoder
from barrel_inference.workers.model.effects import Effects, Found, SaveOrder
from barrel_inference.workers.model.engine import Engine
from barrel_inference.workers.model.job import Job, Stage
from barrel_inference.workers.model.recovery import Recovery
from barrel_inference.workers.model.restore import let_go
from barrel_inference.workers.model.saving import Saver
from barrel_inference.workers.model.sequences import SequenceTable, Use
from barrel_inference.workers.model.state import Limits, State
from barrel_inference.workers.model.text import Piece, undelivered

# Exports do at most this much per turn while others decode.
CHORE_BUDGET_S = 0.005


class Scheduler:
    """The engine thread of one model. Its public methods, except `post` and `start`, run on that thread only."""

    def __init__(self, engine: Engine, effects: Effects, limits: Limits) -> None:
        self.engine = engine
        self.effects = effects
        self.state = State.of(engine, limits)
        self._saver = Saver(self.state, effects)
        recovery = Recovery(self.state, effects, self._saver, self._end, self._wait_for_exports)
        self._decoder = Decoder(self.state, effects, self._saver, recovery, self._end)
        self._admission = Admission(self.state, effects, self._saver, self._end, self._decoder.replay)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._chores: deque[Callable[[], None]] = deque()
        self._stopped = False
        self._when_idle: list[Callable[[], None]] = []
        self._when_packed: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- for the I/O thread to look at

    @property
    def table(self) -> SequenceTable:
        """Which sequence holds what."""
        return self.state.table

    @property
    def waiting(self) -> list[Job]:
        """Requests that do not run yet."""
        return self.state.waiting

    @property
    def running(self) -> dict[int, Job]:
        """Requests that run, by sequence."""
        return self.state.running

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens computed so far."""
        return self._decoder.prefilled_tokens

    @property
    def generated_tokens(self) -> int:
        """Tokens generated so far."""
        return self._decoder.generated_tokens

    @property
    def call_began_s(self) -> float:
        """Since when the thread is inside a decode call; 0 = it is in none."""
        return self._decoder.call_began_s

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
        if spec.session_id and (spec.session_id, job.salt) in self.state.active_sessions:
            self._refuse(
                job,
                StickyBusy(
                    f"session {spec.session_id!r} already has a request in flight",
                    hint="wait for it to finish, or start another session",
                ),
            )
            return
        if spec.mode == "continue":
            refused = sessions.extend(job, self.state.table, self.engine.info.n_ctx)
            if refused is not None:
                self._refuse(job, refused)
                return
        if spec.on_full == "error" and (self.state.waiting or not self._admission.could_start(job)):
            self._refuse(
                job,
                SeqCapacity(
                    f"all {len(self.state.table.sequences)} sequences are in use",
                    hint='try again, use on_full="block", or load the model with a larger context_opts.n_seq_max',
                ),
            )
            return
        if spec.session_id:
            self.state.active_sessions.add((spec.session_id, job.salt))
        self.state.waiting.append(job)
        self.effects.changed()

    def resolved(self, job: Job, found: Found) -> None:
        """The index has answered for a waiting request."""
        self._admission.resolved(job, found)

    def cancel(self, request_id: str) -> None:
        """End a request; unknown ids are fine."""
        for job in self.state.jobs():
            if job.id == request_id:
                job.cancelled = True
                self._end(job, "cancelled")

    def expire(self, request_id: str) -> None:
        """End a request whose deadline has passed."""
        for job in self.state.jobs():
            if job.id == request_id:
                self._end(job, None, DeadlineExceeded("the deadline passed", hint="allow more time: deadline_s"))

    def end_session(self, session: str, salt: bytes, *, reset: bool) -> BarrelError | None:
        """Release a session's sequence; the cells stay warm. Returns why not."""
        key = (session, salt)
        own = self.state.table.of_session(session, salt)
        if key in self.state.active_sessions:
            if not reset:
                return StickyBusy(f"session {session!r} has a request in flight", hint="cancel it, or wait for it")
            for job in self.state.jobs():
                if job.spec.session_id == session and job.salt == salt:
                    job.cancelled = True
                    self._end(job, "cancelled")
            own = self.state.table.of_session(session, salt)
        elif own is None:
            return NoSession(f"no session {session!r}", hint="it was never started, was ended, or was reclaimed")
        if own is not None:
            own.session = None
            own.use = Use.WARM if own.tokens else Use.FREE
        self.effects.changed()
        return None

    def save_packed(self, seq: int) -> None:
        """An export of this sequence needs its cells no longer."""
        self.state.table[seq].holds -= 1
        waiting, self._when_packed = self._when_packed, []
        for function in waiting:
            function()

    def save_published(self, order: SaveOrder) -> None:
        """Every node of a save is published, or was given up, or nobody is to wait any longer."""
        if order.on_published:
            order.on_published()

    def release_idle(self, done: Callable[[int], None]) -> None:
        """Save idle sessions, then free every idle sequence; `done` gets how many were freed."""
        pinned = [s for s in self.state.table.sequences if s.use is Use.PINNED]
        for own in pinned:
            self._saver.reclaim(own)

        def finish() -> None:
            freed = 0
            for s in self.state.table.sequences:
                if s.use is Use.WARM and not s.holds:
                    self.state.context.clear(s)
                    freed += 1
            done(freed + len(pinned))

        self._saver.after_reclaim(finish)

    def empty(self, then: Callable[[], None]) -> None:
        """While paused: save idle sessions, free every sequence, then run `then`. Nothing computed before is left live."""

        def again() -> None:
            if any(s.holds for s in self.state.table.sequences):  # an export under way needs the cells a moment longer
                self._when_packed.append(lambda: self.empty(then))
            else:
                then()

        self.release_idle(lambda _freed: again())

    def save_everything(self, done: Callable[[int], None]) -> None:
        """Shutdown: end what runs, then save every sequence that holds unsaved tokens, the most valuable first;
        `done` gets their number."""
        for job in self.state.jobs():
            job.cancelled = True
            self._end(job, "cancelled")
        worth = sorted(
            (s for s in self.state.table.sequences if s.tokens),
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
            if not self._saver.save(s, len(s.tokens), SaveReason.SHUTDOWN, on_published=one_done):
                one_done()
        if not worth:
            done(0)

    def pause(self, then: Callable[[], None]) -> None:
        """Start no further request; run `then` once none runs. They go on after `resume`."""
        self._admission.paused = True
        self._when_idle.append(then)

    def resume(self) -> None:
        """Let waiting requests start again."""
        self._admission.paused = bool(self._when_idle)

    # --- the loop

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._take_commands()
                self._do_chores()
                self._become_idle()
                self._admission.place_waiting()
                self._admission.restore_some()
                self._decoder.step()
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
        if self._chores or self.state.restores or self._stopped:
            return True
        if self.state.computing():
            return True
        if self._when_idle and self._is_idle():
            return True
        return self._admission.due() is not None

    def _do_chores(self) -> None:
        end_s = time.perf_counter() + CHORE_BUDGET_S
        while self._chores:
            self._chores.popleft()()
            if self.state.running and time.perf_counter() > end_s:
                return

    def _become_idle(self) -> None:
        if self._when_idle and self._is_idle():
            then, self._when_idle = self._when_idle, []
            for function in then:
                function()

    def _is_idle(self) -> bool:
        return not self.state.running and all(job.stage is Stage.QUEUED for job in self.state.waiting)

    def _wait_for_exports(self) -> None:
        """There is no room, and there will be when exports under way are over."""
        if not self._chores:
            self._inbox.get()()

    # --- ends

    def _refuse(self, job: Job, error: BarrelError) -> None:
        job.error, job.stage = error, Stage.ENDED
        job.times.ended_s = time.monotonic()
        self.effects.ended(job, ())

    def _end(self, job: Job, reason: str | None, error: BarrelError | None = None) -> None:
        """End a request wherever it stands; its sequence stays warm, or pinned to its session."""
        if job.stage is Stage.ENDED:
            return
        if job.sampler is None and job.generated and error is None:
            self._decoder.replay(job)  # it ends before it was resumed: the result has what was delivered all the same
        job.finish_reason, job.error = reason, error
        was_waiting = job in self.state.waiting
        job.stage = Stage.ENDED
        job.times.ended_s = time.monotonic()
        if job.spec.session_id:
            self.state.active_sessions.discard((job.spec.session_id, job.salt))
        context: tuple[int, ...] = ()
        if was_waiting:
            self.state.waiting.remove(job)
            if (found := self.state.found.pop(job.id, None)) is not None:
                let_go(found)
                self.effects.check_in(found, (), ())
        elif job.seq is not None:
            context = self._release(job)
        pieces = self._last_pieces(job)
        if pieces and error is None:
            self.effects.emit(job, pieces)
        if job.sampler is not None:
            job.sampler.close()
            job.sampler = None
        self.effects.rests(job)
        self.effects.ended(job, context)
        self.effects.changed()

    def _last_pieces(self, job: Job) -> list[Piece]:
        """What was held back until the end; the first attempt of a resubmission may have come as far."""
        sent_bytes, sent_ends = job.scanner.delivered_bytes, job.scanner.span_ends
        pieces = job.scanner.finish()
        if (resume := job.spec.resume) is None:
            return pieces
        return undelivered(pieces, max(0, resume.text_bytes - sent_bytes), max(0, resume.span_ends - sent_ends))

    def _release(self, job: Job) -> tuple[int, ...]:
        assert job.seq is not None
        s = self.state.table[job.seq]
        self.state.leave(s)
        self.state.table.touch(s.id)
        s.use = Use.PINNED if job.spec.session_id and s.tokens else Use.WARM if s.tokens else Use.FREE
        if s.use is not Use.PINNED:
            s.session = None
        if job.error is None and self.state.limits.policy.wants_finish(len(s.tokens)):
            self._saver.save(s, len(s.tokens), SaveReason.FINISH, job=job)
        context = tuple(s.tokens)
        self._saver.bound_warm()
        return context

    # --- for observers

    def phase(self) -> Phase:
        """What the model is doing: generating wins over prefilling."""
        stages = {job.stage for job in list(self.state.running.values())}  # a copy: the I/O thread asks too
        if Stage.GENERATING in stages:
            return Phase.GENERATING
        return Phase.PREFILLING if stages else Phase.IDLE
