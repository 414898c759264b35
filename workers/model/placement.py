"""Which sequence a request gets and what it reuses: its session's, a live one, a stored prefix, or nothing. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from barrel_inference.protocol import HitKind
from barrel_inference.workers.model import grid
from barrel_inference.workers.model.chain import NO_SEAM, Seam, common_prefix, find_seam
from barrel_inference.workers.model.job import Job, Stage
from barrel_inference.workers.model.sequences import Sequence_, SequenceTable, Use


class How(StrEnum):
    """What is done to the target sequence first."""

    KEEP = "keep"  # it holds the prefix: cut it there
    SHARE = "share"  # copy the prefix's cells from another sequence
    CLEAR = "clear"  # start from nothing, or from stored nodes
    WAIT = "wait"  # no sequence is free yet
    RECLAIM = "reclaim"  # save an idle session's sequence first, then look again
    FOLLOW = "follow"  # another request is computing the same head: wait for it


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision. `seam` says what is reused; `stored` that stored nodes reach further than what is live."""

    how: How
    target: int | None = None
    source: int | None = None
    seam: Seam = NO_SEAM
    stored: bool = False
    sticky: bool = False


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the engine can do with live sequences."""

    can_share: bool  # copy a prefix's cells between sequences
    can_cut: Callable[[int, int], bool]  # (sequence, length)
    min_reuse_tokens: int
    grid_tokens: int = 0  # of a deterministic context, see `grid`


def place(
    job: Job,
    table: SequenceTable,
    running: Sequence[Job],
    rendered: Callable[[int], bytes],
    stored_tokens: int,
    able: Abilities,
) -> Placement:
    """Decide where a request goes. `stored_tokens`: how many of the caller's tokens stored nodes cover (0 = none)."""
    prompt = [*job.prompt, *job.generated]
    session = job.spec.session_id
    own = table.of_session(session, job.salt) if session else None
    if own is not None:
        if own.holds:
            return Placement(How.WAIT)
        seam = _own_part(own, job, rendered, able)
        if stored_tokens > seam.caller_tokens:
            return Placement(How.CLEAR, own.id, stored=True)
        if seam.caller_tokens >= able.min_reuse_tokens or seam.stored_tokens == len(own.tokens) > 0:
            return Placement(How.KEEP, own.id, own.id, seam, sticky=True)
        return Placement(How.CLEAR, own.id)
    live = table.best_live(prompt, job.salt, rendered)
    live_tokens = live.seam.caller_tokens if live else 0
    reachable = max(live_tokens, stored_tokens)
    if able.can_share and _leader_ahead(job, running, reachable, able.min_reuse_tokens):
        return Placement(How.FOLLOW)
    if live and live_tokens >= max(stored_tokens, 1):
        chosen = _from_live(table[live.source], live.seam, len(prompt), table, able)
        if chosen is not None and chosen.seam.caller_tokens >= max(
            stored_tokens, min(able.min_reuse_tokens, len(prompt))
        ):
            return chosen
    target = table.idle_choice()
    if target is None:
        return Placement(How.RECLAIM if table.oldest_pinned() else How.WAIT)
    return Placement(How.CLEAR, target.id, stored=stored_tokens > 0)


def live_reach(job: Job, table: SequenceTable, rendered: Callable[[int], bytes], able: Abilities) -> int:
    """Tokens of the prompt that live cells will serve, at once or when an export of them is over; no save of those is worth
    waiting for."""
    prompt = [*job.prompt, *job.generated]
    own = table.of_session(job.spec.session_id, job.salt) if job.spec.session_id else None
    if own is not None:
        return _own_part(own, job, rendered, able).stored_tokens
    live = table.best_live(prompt, job.salt, rendered) if not able.grid_tokens else None
    if live is None or (table[live.source].use is Use.BUSY and not able.can_share):
        return 0
    return _usable(table[live.source], live.seam, len(prompt), able).stored_tokens


def _own_part(own: Sequence_, job: Job, rendered: Callable[[int], bytes], able: Abilities) -> Seam:
    """What a request can go on from in its session's sequence."""
    prompt = [*job.prompt, *job.generated]
    seam = find_seam(own.tokens, prompt, rendered)
    if able.grid_tokens:
        seam = grid.live_part(seam, own.prompt_tokens, len(job.prompt), able.grid_tokens)
    return _usable(own, seam, len(prompt), able)


def _from_live(
    source: Sequence_, seam: Seam, prompt_tokens: int, table: SequenceTable, able: Abilities
) -> Placement | None:
    idle = source.use is Use.WARM and not source.holds
    other = table.idle_choice(avoid=source.id)
    loses_nothing = seam.stored_tokens == len(source.tokens)
    if idle and (loses_nothing or other is None or not able.can_share):
        usable = _usable(source, seam, prompt_tokens, able)
        return Placement(How.KEEP, source.id, source.id, usable) if usable.stored_tokens else None
    if able.can_share and other is not None and able.can_cut(source.id, seam.stored_tokens):
        return Placement(How.SHARE, other.id, source.id, seam)
    if source.use is Use.WARM and source.holds and other is None:
        return Placement(How.WAIT)
    return None


def _usable(source: Sequence_, seam: Seam, prompt_tokens: int, able: Abilities) -> Seam:
    """The seam, or nothing if the sequence cannot be cut where the first token is computed that has to be."""
    keep = seam.stored_tokens
    if seam.caller_tokens == prompt_tokens and source.logits_at != keep:
        seam, keep = grid.without_logits(seam, able.grid_tokens)
    if keep == len(source.tokens) or able.can_cut(source.id, keep):
        return seam
    return NO_SEAM


def _leader_ahead(job: Job, running: Sequence[Job], reachable: int, worth_tokens: int) -> bool:
    """Is a request that prefills right now going to hold more of this prompt than can be reused at once?"""
    for other in running:
        if other is job or other.salt != job.salt or other.stage not in (Stage.RESTORING, Stage.PREFILLING):
            continue
        shared = common_prefix(other.tokens, job.prompt)
        if shared >= worth_tokens and shared > reachable:
            return True
    return False


def hit_kind(placement: Placement, reused: int, prompt_tokens: int, held_before: int) -> HitKind:
    """The kind that a placement is reported as. `held_before`: tokens the session's sequence held."""
    if not reused:
        return HitKind.COLD
    if placement.sticky and (reused == prompt_tokens or placement.seam.stored_tokens == held_before):
        return HitKind.STICKY
    return HitKind.EXACT if reused == prompt_tokens else HitKind.PARTIAL
