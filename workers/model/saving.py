"""When what is saved, and giving sequences up with a save. Runs on the engine thread; the I/O thread does the saving."""

from collections.abc import Callable

from barrel_inference.protocol import HitKind, SaveReason
from barrel_inference.workers.model import grid
from barrel_inference.workers.model.effects import Effects, SaveOrder
from barrel_inference.workers.model.grid import ends_on_grid
from barrel_inference.workers.model.job import Job
from barrel_inference.workers.model.sequences import Sequence_, Use
from barrel_inference.workers.model.state import State


class Saver:
    """Orders saves."""

    def __init__(self, state: State, effects: Effects) -> None:
        self._state = state
        self._effects = effects
        self._reclaims = 0  # evict saves of idle sessions under way
        self._when_reclaimed: list[Callable[[], None]] = []

    def save(
        self, s: Sequence_, length: int, reason: SaveReason, *, job: Job | None = None, pinned: bool = False,
        on_published: Callable[[], None] | None = None,
    ) -> bool:  # fmt: skip
        """Order a save, whatever was ordered before: the index knows what some tier holds. False: there is nothing to save."""
        if self._state.limits.deterministic:
            length = grid.savable(length, s.prompt_tokens, self._state.limits.grid_tokens)
        if not self._state.engine.info.cacheable or not length:
            return False
        if reason in (SaveReason.EVICT, SaveReason.SHUTDOWN) and self._state.limits.policy.saves_nothing:
            return False
        if length == len(s.tokens):
            self._state.context.take_snapshot(s)
        snapshots = dict(self._state.context.snapshots.get(s.id, {}))
        if self._state.engine.info.needs_snapshot and length not in snapshots:
            return False
        s.holds += 1
        s.saved_tokens = max(s.saved_tokens, length)
        logits = (s.logits_at, s.logits) if 0 < s.logits_at <= length else None
        self._effects.save(
            SaveOrder(s.id, tuple(s.tokens[:length]), s.salt, reason, snapshots, logits, job, pinned, on_published)
        )
        return True

    def save_prompt(self, job: Job, s: Sequence_, held: int) -> None:
        """The saves that belong to the prompt: the caller's static head, and the cold save; once each."""
        policy = self._state.limits.policy
        pin = min(job.spec.prefix_checkpoint_len or 0, job.prompt_tokens)
        if pin and not job.pin_saved and held >= pin:
            job.pin_saved = True
            self.save(s, pin, SaveReason.AGENT_PREFIX, job=job, pinned=True)
        if job.cold_saved or job.hit.kind is not HitKind.COLD or not policy.wants_cold(job.prompt_tokens):
            return
        boundary = policy.cold_boundary(job.prompt_tokens)
        if boundary and held >= boundary:
            job.cold_saved = True
            self.save(s, boundary, SaveReason.COLD, job=job)

    def reclaim(self, own: Sequence_) -> None:
        """End an idle session: save it, then free its sequence, unless a request has taken that by then."""
        own.session, own.use = None, Use.WARM
        used = own.used
        self._reclaims += 1

        def over() -> None:
            self._reclaims -= 1
            if own.use is Use.WARM and own.used == used and not own.holds:
                self._state.context.clear(own)
            self._effects.changed()
            if not self._reclaims:
                waiting, self._when_reclaimed = self._when_reclaimed, []
                for function in waiting:
                    function()

        if not self.save(own, len(own.tokens), SaveReason.EVICT, on_published=over):
            over()

    def bound_warm(self) -> None:
        """Idle cells slow every token of the others: keep at most `warm_cells` of them."""
        warm = sorted((s for s in self._state.table.sequences if s.use is Use.WARM), key=lambda s: s.used)
        total = sum(len(s.tokens) for s in warm)
        for s in warm[:-1] if len(warm) > 1 else []:
            if total <= self._state.limits.warm_cells:
                return
            if not s.holds:
                total -= len(s.tokens)
                self._state.context.clear(s)

    def snapshot_points(self, job: Job) -> tuple[int, ...]:
        """Where the state is remembered while a prompt is computed, for models that resume only there."""
        if not self._state.engine.info.needs_snapshot or not self._state.engine.info.cacheable:
            return ()
        length, grid_tokens = job.prompt_tokens, self._state.limits.grid_tokens
        if grid_tokens:  # a slice that ended elsewhere would not be computed as others compute it
            points = [*range(grid_tokens, length + 1, grid_tokens)]
        else:
            points = [job.spec.prefix_checkpoint_len or 0, self._state.limits.policy.cold_boundary(length)]
        if not ends_on_grid(length, grid_tokens):
            points.append(length - 1)
        if grid_tokens or self._state.keeps_logits(job):  # saves end with the prompt
            points.append(length)
        return tuple(point for point in points if point > 0)

    def after_reclaim(self, then: Callable[[], None]) -> None:
        """Run `then` once no sequence is being reclaimed."""
        if self._reclaims:
            self._when_reclaimed.append(then)
        else:
            then()
