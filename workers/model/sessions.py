"""What a continued session is asked to be, against what it is. Pure."""

from barrel_inference.errors import BarrelError, ContextOverflow, NoSession, TranscriptMismatch
from barrel_inference.workers.model.chain import common_prefix
from barrel_inference.workers.model.job import Job
from barrel_inference.workers.model.sequences import SequenceTable, Use


def extend(job: Job, table: SequenceTable, n_ctx: int) -> BarrelError | None:
    """Put what the session holds before a continuation's suffix; or say why that cannot be."""
    session = job.spec.session_id or ""
    own = table.of_session(session, job.salt)
    if own is None or own.use is not Use.PINNED:
        return NoSession(f"no session {session!r}", hint="start it with a whole prompt: complete(session_id=...)")
    expected = job.spec.expect_committed
    if expected is not None and list(expected) != own.tokens:
        at = common_prefix(own.tokens, expected)
        return TranscriptMismatch(
            f"session {session!r} holds {len(own.tokens)} tokens, {len(expected)} were expected, they differ at {at}",
            hint="send the whole prompt", stored=len(own.tokens), expected=len(expected), diverge=at,
        )  # fmt: skip
    tokens = [*own.tokens, *job.prompt]
    room = n_ctx - len(tokens)
    if room < max(1, len(job.generated)):
        return ContextOverflow(
            f"session and suffix have {len(tokens) + len(job.generated)} tokens, n_ctx is {n_ctx}",
            hint="start a new session with a shorter prompt",
        )
    job.prompt = tokens
    job.limit_tokens = min(job.limit_tokens, room)
    return None
