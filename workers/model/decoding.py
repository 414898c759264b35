"""One decode call: which rows, what their logits say, what follows from it. Runs on the engine thread."""

import time

from barrel_inference.errors import GrammarFailed
from barrel_inference.protocol import SaveReason
from barrel_inference.workers.model import batch
from barrel_inference.workers.model.effects import Effects
from barrel_inference.workers.model.engine import Logits, NoCells, Row, StepFailed, StepInterrupted
from barrel_inference.workers.model.grid import ends_on_grid
from barrel_inference.workers.model.job import Job, Stage
from barrel_inference.workers.model.recovery import Recovery
from barrel_inference.workers.model.saving import Saver
from barrel_inference.workers.model.state import End, State
from barrel_inference.workers.model.text import Piece, undelivered


class Decoder:
    """Makes the calls."""

    def __init__(self, state: State, effects: Effects, saver: Saver, recovery: Recovery, end: End) -> None:
        self._state = state
        self._effects = effects
        self._saver = saver
        self._recovery = recovery
        self._end = end
        self.prefilled_tokens = 0
        self.generated_tokens = 0
        self.call_began_s = 0.0  # read by the I/O thread: inside a decode call since then; 0 = in none
        self._turn = 0

    def step(self) -> None:
        for job in self._state.computing():
            self._start(job)
        jobs = self._state.computing()
        if not jobs:
            return
        wants = [self._want(job) for job in jobs]
        deciding = any(not want.prefill for want in wants)
        chunk = (
            self._state.limits.prefill_chunk
            if deciding or len(jobs) > 1 or self._state.limits.deterministic
            else self._lone_chunk()
        )
        self._turn += 1
        parts = batch.plan(wants, n_batch=self._state.engine.info.n_batch, chunk=chunk, first=self._turn)
        try:
            self._decode(parts)
        except NoCells:
            self._recovery.make_room(parts)
        except StepInterrupted as stopped:
            self._recovery.after_interrupt(parts, stopped)
        except StepFailed as failed:
            self._try_each(parts, failed)

    def _start(self, job: Job) -> None:
        """An identical prompt whose last row was kept has nothing to compute before its first token."""
        assert job.seq is not None
        s = self._state.table[job.seq]
        if len(s.tokens) < len(job.tokens):
            return
        assert s.logits_at == len(s.tokens), (s.logits_at, len(s.tokens))
        if job.spec.mode != "prefill" and job.finish_reason is None:
            self._sample(job, s.logits)
        if job.stage is not Stage.ENDED:
            self._after_row(job)

    def _try_each(self, parts: list[batch.Slice], failed: StepFailed) -> None:
        """One row is bad: each sequence by itself, so that only that one's request suffers."""
        if len(parts) == 1:
            self._recovery.after_failure(parts[0], failed)
            return
        for part in parts:
            if part.seq in self._state.running:
                try:
                    self._decode([part])
                except StepFailed as again:
                    self._recovery.after_failure(part, again)

    def _lone_chunk(self) -> int:
        # Alone, a longer slice costs nobody anything; not the whole batch, so that a cancel or a newcomer waits little.
        return max(self._state.limits.prefill_chunk, min(self._state.engine.info.n_batch, 256))

    def _want(self, job: Job) -> batch.Want:
        assert job.seq is not None
        held = len(self._state.table[job.seq].tokens)
        ready = len(job.tokens) - held
        alone = 0 if ends_on_grid(job.prompt_tokens, self._state.limits.grid_tokens) else 1
        prefill = max(0, job.prompt_tokens - alone - held)
        if not prefill and ready > 1 and not self._state.limits.deterministic:
            prefill = ready - 1  # tokens generated before a restart: a slice is faster than one by one
        for point in self._saver.snapshot_points(job):
            if held < point < held + prefill:
                prefill = point - held
        return batch.Want(job.seq, held, ready, prefill)

    def _decode(self, parts: list[batch.Slice]) -> None:
        rows: list[Row] = []
        with_logits: list[tuple[Job, int]] = []
        for part in parts:
            job = self._state.running[part.seq]
            end = part.position + part.count
            for position in range(part.position, end):
                rows.append(Row(job.tokens[position], position, part.seq, False))
            is_last = end == len(job.tokens) and job.finish_reason is None
            if is_last and (job.spec.mode != "prefill" or self._state.keeps_logits(job)):
                rows[-1] = rows[-1]._replace(wants_logits=True)
                with_logits.append((job, len(rows) - 1))
        self.call_began_s = time.monotonic()
        try:
            self._state.engine.decode(rows)
        finally:
            self.call_began_s = 0.0
        for part in parts:
            self._advance(part)
        for job, row in with_logits:
            if job.stage is not Stage.ENDED:
                self._use_row(job, self._state.engine.logits(row))
        for part in parts:
            if part.seq in self._state.running:
                self._after_row(self._state.running[part.seq])

    def _advance(self, part: batch.Slice) -> None:
        job, s = self._state.running[part.seq], self._state.table[part.seq]
        end = part.position + part.count
        s.tokens += job.tokens[part.position : end]
        job.fresh_restore = ()
        new_prompt = max(0, min(end, job.prompt_tokens) - part.position)
        self.prefilled_tokens += new_prompt
        if end in self._saver.snapshot_points(job):
            self._state.context.take_snapshot(s)

    def _use_row(self, job: Job, logits: Logits) -> None:
        assert job.seq is not None
        s = self._state.table[job.seq]
        if len(s.tokens) == job.prompt_tokens and self._state.keeps_logits(job):
            s.logits, s.logits_at = bytes(logits), job.prompt_tokens
        if job.spec.mode != "prefill":
            self._sample(job, logits)

    def _after_row(self, job: Job) -> None:
        assert job.seq is not None
        s = self._state.table[job.seq]
        held = len(s.tokens)
        if job.stage is Stage.PREFILLING and held >= job.prompt_tokens:
            job.stage = Stage.GENERATING
            job.times.prefilled_s = time.monotonic()
            self._effects.changed()
        self._saver.save_prompt(job, s, held)
        if job.spec.mode == "prefill" and held == len(job.tokens):
            job.times.prefilled_s = job.times.prefilled_s or time.monotonic()
            self._end(job, "length", None)
        elif job.finish_reason is not None and held >= len(job.tokens) - self._state.limits.deterministic:
            self._end(job, job.finish_reason, None)
        elif (
            self._state.limits.policy.wants_continued(held, max(s.saved_tokens, job.prompt_tokens))
            and not self._state.limits.deterministic
        ):
            self._saver.save(s, held, SaveReason.CONTINUED, job=job)

    def _sample(self, job: Job, logits: Logits) -> None:
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
                    top = job.sampler.top_logprobs(logits, job.spec.sampling.logprobs)
                    job.logprobs.append({"top": [{"id": t, "logprob": p} for t, p in top]})
                token = job.sampler.sample(logits, number)
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
                self._effects.changed()
        if self._state.engine.is_end(token):
            if job.logprobs:
                job.logprobs.pop()
            job.finish_reason = "stop"
            return
        job.generated.append(token)
        job.tokens.append(token)
        self.generated_tokens += 1
        pieces = self._hear(job, token, number + 1, is_forced=is_forced)
        if pieces:
            self._effects.emit(job, pieces)

    def _hear(self, job: Job, token: int, count: int, *, is_forced: bool) -> list[Piece]:
        """What the `count`-th generated token says, and whether the reply ends with it."""
        # A forced token closes a span that is closed already: the caller has been told, and sees no marker in the text.
        pieces = job.scanner.feed(token, b"" if is_forced else self.visible(token, job))
        budget = job.spec.thinking_budget_tokens
        if budget is not None and job.scanner.span == "thinking" and job.scanner.thinking_tokens >= budget:
            pieces += job.scanner.close_thinking()
            closing = job.scanner.markers.thinking
            if closing:  # the model has to see that it has stopped thinking
                job.forced = self._state.engine.tokenize(closing[1], add_special=False, parse_special=True)
        if job.scanner.stopped_by is not None:
            job.finish_reason = "stop"
        elif count >= job.limit_tokens:
            job.finish_reason = "length"
        return pieces

    def visible(self, token: int, job: Job) -> bytes:
        """A token's bytes for the scanner: its text, or the marker that it is."""
        text = self._state.engine.piece(token)
        if text:
            return text
        spelt = self._state.engine.special_piece(token)
        markers = job.scanner.markers
        known = [text for pair in (markers.thinking, markers.tool_call) if pair for text in pair]
        return spelt if spelt in known else b""

    def replay(self, job: Job) -> None:
        """A resubmission: what was delivered counts as generated, through sampler, stops, spans and limits.

        Nothing is sent again; what a delivered token had still to say when the connection broke is sent now.
        """
        resume = job.spec.resume
        if resume is None:
            return
        pieces: list[Piece] = []
        for number, token in enumerate(job.generated):
            if job.sampler is not None:
                job.sampler.accept(token, number)
            if job.spec.sampling.logprobs:  # what the others were is lost with the process that knew
                job.logprobs.append({"id": token, "top": []})
            is_forced = bool(job.forced)
            del job.forced[:1]
            pieces += self._hear(job, token, number + 1, is_forced=is_forced)
        job.scanner.all_named()
        if resume.text_bytes > job.scanner.delivered_bytes:
            # Text that is held back was let go, which only the end of a reply does: nothing may follow it.
            job.finish_reason = job.finish_reason or "stop"
        rest = undelivered(pieces, resume.text_bytes, resume.span_ends)
        if rest:
            self._effects.emit(job, [Piece(piece.kind, piece.data) for piece in rest])
