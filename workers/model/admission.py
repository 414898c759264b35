"""From the queue to a sequence: lookup, placement, restore. Runs on the engine thread."""

import time
from collections.abc import Callable
from concurrent.futures import wait

from barrel_inference.errors import BarrelError
from barrel_inference.protocol import HitKind
from barrel_inference.workers.model.chain import NO_SEAM
from barrel_inference.workers.model.effects import Effects, Found
from barrel_inference.workers.model.job import Job, Stage
from barrel_inference.workers.model.placement import How, Placement, hit_kind, live_reach, place
from barrel_inference.workers.model.restore import Restore, let_go, live_part
from barrel_inference.workers.model.saving import Saver
from barrel_inference.workers.model.sequences import Sequence_, Use
from barrel_inference.workers.model.state import End, State

# Restores do at most this much per turn while others decode.
RESTORE_BUDGET_S = 0.005

# A read that takes longer leaves room for commands: a cancel, another request.
READ_WAIT_S = 0.02

# A preempted request starts again when so many cells would be left: the others are to grow for a while before it is in their
# way again.
RESUME_ROOM_TOKENS = 64


class Admission:
    """First come, first served; nobody overtakes a request that waits for a sequence."""

    def __init__(self, state: State, effects: Effects, saver: Saver, end: End, replay: Callable[[Job], None]) -> None:
        self._state = state
        self._effects = effects
        self._saver = saver
        self._end = end
        self._replay = replay
        self.paused = False

    def could_start(self, job: Job) -> bool:
        """Is there a sequence for it, those counted off that others are about to take?"""
        others = [*self._state.running.values(), *(j for j in self._state.waiting if j.stage is not Stage.QUEUED)]
        if others and (self._state.limits.deterministic or job.is_suspect or any(other.is_suspect for other in others)):
            return False
        if others and job.preempted and not self._has_room([job, *others]):
            return False
        under_way = sum(j.stage in (Stage.RESOLVING, Stage.PLACING) for j in self._state.waiting)
        if job.spec.session_id and self._state.table.of_session(job.spec.session_id, job.salt):
            return True
        return under_way < self._state.table.available()

    def _has_room(self, jobs: list[Job]) -> bool:
        """Do they all fit for a while? Cells that several share are counted for each of them."""
        wanted = sum(max(len(job.tokens), len(job.prompt) + len(job.generated)) for job in jobs)
        return wanted + RESUME_ROOM_TOKENS <= self._state.engine.info.n_cells

    def due(self) -> Job | None:
        """The waiting request that can be moved on now; None: each waits for something that a command will announce.

        Requests start in the order of arrival, and none overtakes one that waits for a sequence. But who has started goes on
        whoever is queued before it: a preempted request stands there and may be waiting for it.
        """
        may_start = not self.paused
        for job in self._state.waiting:
            if job.stage is Stage.QUEUED:
                if may_start and self.could_start(job):
                    return job
                may_start = False
            elif job.stage is Stage.PLACING:
                how = self._next_move(job)
                if how not in (How.WAIT, How.FOLLOW):
                    return job
                if how is How.WAIT:
                    return None
        return None

    def _next_move(self, job: Job) -> How:
        company = self._company(job)
        if company:
            return How.RECLAIM if any(s.use is Use.PINNED or not s.holds for s in company) else How.WAIT
        return self._decide(job).how

    def resolved(self, job: Job, found: Found) -> None:
        """The index has answered for a waiting request."""
        if job.stage is not Stage.RESOLVING:
            let_go(found)
            self._effects.check_in(found, (), ())
            return
        self._state.found[job.id] = found
        job.stage = Stage.PLACING

    def place_waiting(self) -> None:
        """Move on what can be moved on."""
        while (job := self.due()) is not None:
            if job.stage is Stage.QUEUED:
                self._start(job)
            else:
                self._place(job)

    def _start(self, job: Job) -> None:
        job.times.admitted_s = time.monotonic()
        job.stage = Stage.RESOLVING
        if self._lookup_is_useless(job):
            cacheable = self._state.engine.info.cacheable
            self.resolved(job, Found(miss_reason=None if cacheable else "memory_kind"))
        else:
            state = self._state
            self._effects.resolve(job, live_reach(job, state.table, state.engine.rendered, state.able))

    def _lookup_is_useless(self, job: Job) -> bool:
        if not self._state.engine.info.cacheable or job.spec.mode == "continue":
            return True
        live = self._state.table.best_live([*job.prompt, *job.generated], job.salt, self._state.engine.rendered)
        return (
            self._state.able.can_share
            and live is not None
            and live.seam.caller_tokens == len(job.prompt) + len(job.generated)
        )

    def _decide(self, job: Job) -> Placement:
        stored = self._state.found[job.id].seam.caller_tokens if job.id in self._state.found else 0
        return place(
            job,
            self._state.table,
            list(self._state.running.values()),
            self._state.engine.rendered,
            stored,
            self._state.able,
        )

    def _place(self, job: Job) -> None:
        if company := self._company(job):
            self._send_away(company)
            return
        decision = self._decide(job)
        if decision.how is How.RECLAIM:
            own = self._state.table.oldest_pinned()
            assert own is not None
            self._saver.reclaim(own)
            return
        assert decision.target is not None
        self._state.waiting.remove(job)
        found = self._state.found.pop(job.id)
        self._occupy(job, decision, found)
        self._effects.changed()

    def _company(self, job: Job) -> list[Sequence_]:
        """Deterministic: the idle sequences that hold cells, which none may while another computes."""
        if not self._state.limits.deterministic:
            return []
        own = self._state.table.of_session(job.spec.session_id, job.salt) if job.spec.session_id else None
        return [s for s in self._state.table.sequences if s is not own and s.tokens and s.use is not Use.BUSY]

    def _send_away(self, company: list[Sequence_]) -> None:
        for s in company:
            if s.use is Use.PINNED:
                self._saver.reclaim(s)
            elif not s.holds:
                self._state.context.clear(s)

    def _occupy(self, job: Job, decision: Placement, found: Found) -> None:
        """Give a request its sequence, with what the sequence is to hold of the prompt already."""
        self._effects.computes(job)
        s = self._state.table[decision.target or 0]
        wanted = [*job.prompt, *job.generated]
        if decision.stored:
            is_alike = not self._state.limits.deterministic  # what it holds was computed as what is stored was
            self._state.context.cut(s, live_part(self._state.context, s, found) if is_alike else 0)
            job.begin_context((), wanted)
        else:
            self._reuse_live(job, s, decision, found, wanted)
        s.use, s.salt = Use.BUSY, job.salt
        if job.spec.session_id:
            s.session = job.spec.session_id
        self._state.table.touch(s.id)
        job.seq = s.id
        self._state.running[s.id] = job
        if decision.stored:
            job.stage = Stage.RESTORING
            self._state.restores[s.id] = Restore(
                self._state.context, self._effects, job, s, found,
                able=self._state.able, then=lambda: self._restored(job),
            )  # fmt: skip
        else:
            let_go(found)
            self._effects.check_in(found, (), ())
            self._restored(job)

    def _reuse_live(self, job: Job, s: Sequence_, decision: Placement, found: Found, wanted: list[int]) -> None:
        seam, held_before = decision.seam, len(s.tokens)
        if decision.how is How.SHARE and not self._state.context.share(
            self._state.table[decision.source or 0], s, seam.stored_tokens
        ):
            seam = NO_SEAM
        elif decision.how is How.CLEAR:
            self._state.context.clear(s)
        job.begin_context(s.tokens[: seam.stored_tokens], wanted[seam.caller_tokens :])
        keep = seam.stored_tokens
        if keep == len(job.tokens) != s.logits_at:
            keep -= 1  # the last token is computed again, for its logits
        if keep < len(s.tokens) and not self._state.context.cut(s, keep):
            job.begin_context((), wanted)
            seam = NO_SEAM
        reused = seam.stored_tokens
        job.hit.kind = hit_kind(decision, reused, job.prompt_tokens, held_before)
        if job.spec.mode == "continue":
            job.hit.kind = HitKind.CONTINUATION
        job.hit.read_tokens, job.hit.retokenised = reused, seam.retokenised
        job.hit.source, job.hit.via = ("live", found.via) if reused else (None, "none")
        job.hit.miss_reason, job.hit.divergence_byte = found.miss_reason, found.divergence_byte
        if reused:
            is_partial = job.hit.kind is HitKind.PARTIAL
            job.hit.miss_reason = "diverged" if is_partial else None
            live_bytes = sum(len(self._state.engine.rendered(token)) for token in wanted[: seam.caller_tokens])
            job.hit.divergence_byte = max(live_bytes, found.divergence_byte or 0) if is_partial else None

    def restore_some(self) -> None:
        """Import nodes, for a few milliseconds if others compute; alone, wait for what is still being read."""
        end_s = time.perf_counter() + RESTORE_BUDGET_S
        others = any(job.stage in (Stage.PREFILLING, Stage.GENERATING) for job in self._state.running.values())
        for seq, restore in list(self._state.restores.items()):
            while restore.step():
                if restore.awaited is not None:
                    if others or len(self._state.restores) > 1:
                        break
                    wait([restore.awaited], READ_WAIT_S)
                    break
                if others and time.perf_counter() > end_s:
                    return
            else:
                self._state.restores.pop(seq, None)

    def _restored(self, job: Job) -> None:
        job.times.restored_s = time.monotonic()
        if job.seq is not None:
            self._state.table[job.seq].prompt_tokens = job.prompt_tokens
        job.stage = Stage.PREFILLING
        try:
            if job.sampler is None and job.spec.mode != "prefill":
                job.sampler = self._state.engine.new_sampler(
                    job.spec.sampling, seed=job.seed, prompt=job.tokens[: job.prompt_tokens]
                )
                self._replay(job)
        except BarrelError as refused:
            self._end(job, None, refused)
