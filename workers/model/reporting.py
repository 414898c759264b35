"""What is told of a request when it is over, and how fast a model generates. Pure; no text of a prompt or reply but in the result."""

from collections import deque
from typing import Any

from barrel_inference.protocol import Completed
from barrel_inference.workers.model.job import Job

# The rate is that of the last few seconds: long enough to be steady, short enough to show a stall.
RATE_WINDOW_S = 3.0


class Rate:
    """How many a second lately, from a count that only grows."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, total: int, now_s: float) -> None:
        """The count is this now."""
        self._seen.append((now_s, total))
        # The last one outside the window stays: the window is never shorter than it says.
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - RATE_WINDOW_S:
            self._seen.popleft()

    def rest(self) -> None:
        """Nothing is counted at present: what comes next begins anew."""
        self._seen.clear()

    def per_s(self, total: int, now_s: float) -> float:
        """The mean since the window began."""
        if not self._seen or now_s <= self._seen[0][0]:
            return 0.0
        began_s, began = self._seen[0]
        return round((total - began) / (now_s - began_s), 2)


def completed(job: Job, context: tuple[int, ...], finish_key: bytes | None, created_tokens: int) -> Completed:
    """The body of the answer."""
    times, hit = job.times, job.hit
    stop = job.scanner.stopped_by
    return Completed(
        reply_bytes=bytes(job.scanner.reply), generated=list(job.generated),
        context_tokens=list(context), committed_tokens=len(context), finish_reason=job.finish_reason or "cancelled",
        stop_sequence=stop.decode(errors="replace") if stop is not None else None, finish_key=finish_key,
        cache_hit_kind=hit.kind, cache_read=hit.read_tokens, cache_created=created_tokens, hit_source=hit.source,
        retokenised=hit.retokenised, miss_reason=hit.miss_reason, divergence_byte=hit.divergence_byte,
        prompt_tokens=job.prompt_tokens or len(job.prompt), completion_tokens=len(job.generated),
        queue_ms=_ms(times.arrived_s, times.admitted_s or times.ended_s),
        restore_ms=_ms(times.admitted_s, times.restored_s), prefill_ms=_ms(times.restored_s, times.prefilled_s),
        generation_ms=_ms(times.first_token_s, times.ended_s), ttft_ms=_ms(times.arrived_s, times.first_token_s),
        seed=job.seed, logprobs=list(job.logprobs) if job.spec.sampling.logprobs else None,
    )  # fmt: skip


def statistics(job: Job, body: Completed, ended_unix_s: float) -> dict[str, Any]:
    """What observers, logs and metrics get of a request that is over, failed ones included (`code` says why)."""
    is_failed = job.error is not None
    was_placed = job.seq is not None  # else nothing was looked up for it that it could have hit or missed
    return {
        "kind": body.cache_hit_kind.value if was_placed else None, "source": body.hit_source,
        "read_tokens": body.cache_read, "created_tokens": body.cache_created,
        "prompt_tokens": body.prompt_tokens, "completion_tokens": body.completion_tokens,
        "miss_reason": body.miss_reason, "divergence_byte": body.divergence_byte,
        "finish_reason": "error" if is_failed else body.finish_reason,
        "code": job.error.code if job.error is not None else None,
        "queue_ms": body.queue_ms, "restore_ms": body.restore_ms, "prefill_ms": body.prefill_ms,
        "generation_ms": body.generation_ms, "ttft_ms": body.ttft_ms, "attempt": job.attempt,
        "ended_unix_s": ended_unix_s,
    }  # fmt: skip


def _ms(start_s: float, end_s: float) -> float:
    return round(max(0.0, end_s - start_s) * 1000, 3) if start_s and end_s else 0.0
