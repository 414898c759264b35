"""When a decode call could not be made: no room, over its budget, refused. Runs on the engine thread."""

from collections.abc import Callable

from barrel_inference.errors import ContextOverflow, DecodeFailed, DecodeTimeout
from barrel_inference.protocol import HitKind, SaveReason
from barrel_inference.workers.model.batch import Slice
from barrel_inference.workers.model.effects import Effects, Found, StoredNode
from barrel_inference.workers.model.engine import StepFailed, StepInterrupted
from barrel_inference.workers.model.job import Job, Stage
from barrel_inference.workers.model.saving import Saver
from barrel_inference.workers.model.sequences import Use
from barrel_inference.workers.model.state import End, State


class Recovery:
    """Lets as few requests as possible suffer."""

    def __init__(
        self, state: State, effects: Effects, saver: Saver, end: End, wait_for_exports: Callable[[], None]
    ) -> None:
        self._state = state
        self._effects = effects
        self._saver = saver
        self._end = end
        self._wait_for_exports = wait_for_exports

    def make_room(self, parts: list[Slice]) -> None:
        """Idle sequences go first; then the request admitted last is saved, freed, and resumed later."""
        if self._state.context.free_one_idle():
            return
        own = self._state.table.oldest_pinned()
        if own is not None:
            self._saver.reclaim(own)
            return
        if any(s.holds for s in self._state.table.sequences):
            self._wait_for_exports()
            return
        jobs = sorted(self._state.running.values(), key=lambda job: job.times.admitted_s)
        if len(jobs) > 1:
            self._preempt(jobs[-1])
            return
        job = self._state.running[parts[0].seq]
        self._end(
            job,
            None,
            ContextOverflow(
                f"{len(job.tokens)} tokens do not fit in {self._state.engine.info.n_cells} KV cells",
                hint="shorten the prompt, or load the model with a larger context_opts.kv_cells",
            ),
        )

    def _preempt(self, job: Job) -> None:
        assert job.seq is not None
        s = self._state.table[job.seq]
        self._state.leave(s)
        session = s.session
        s.session, s.use = None, Use.WARM
        self._saver.save(s, len(s.tokens), SaveReason.EVICT, job=job)
        job.seq, job.stage, job.preempted = None, Stage.QUEUED, True
        self._state.waiting.insert(0, job)
        self._effects.rests(job)
        if session and job.spec.session_id:
            self._state.active_sessions.add((job.spec.session_id, job.salt))
        self._effects.changed()

    def after_interrupt(self, parts: list[Slice], stopped: StepInterrupted) -> None:
        """A call ran over its budget: the longest prefill in it fails; the others' rows are computed again."""
        for part in parts:
            s, length = self._state.table[part.seq], stopped.lengths.get(part.seq)
            job = self._state.running[part.seq]
            if length is None:
                self._end(job, None, self._timeout())
                self._state.context.clear(s)
            else:
                s.tokens = job.tokens[:length]
                self._state.context.cut(s, min(length, part.position))
        slowest = max(parts, key=lambda part: part.count)
        if slowest.seq in self._state.running:
            self._end(self._state.running[slowest.seq], None, self._timeout())

    def _timeout(self) -> DecodeTimeout:
        return DecodeTimeout(
            f"one step took longer than decode_budget_ms = {self._state.limits.decode_budget_ms}",
            hint="send it again, or load the model with a larger context_opts.decode_budget_ms",
        )

    def after_failure(self, part: Slice, failed: StepFailed) -> None:
        """A sequence's rows were refused by themselves: it goes on cold if it was just restored, else its request ends."""
        job = self._state.running[part.seq]
        s = self._state.table[part.seq]
        if job.fresh_restore:
            self._effects.check_in(Found(), (), tuple(_bad_copy(key, server) for key, server in job.fresh_restore))
            job.fresh_restore = ()
            self._state.context.clear(s)
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
        self._state.context.clear(s)


def _bad_copy(key: bytes, server: str) -> StoredNode:
    return StoredNode(key, server, "", 0, 0, memoryview(b""), None, None, lambda: False)
