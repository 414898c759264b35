"""What the parts of the engine thread share: the requests, the sequences, what was decided at load. Engine thread only."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from barrel_inference.errors import BarrelError
from barrel_inference.tiers.policy import Policy
from barrel_inference.workers.model.context import Context
from barrel_inference.workers.model.effects import Found
from barrel_inference.workers.model.engine import Engine
from barrel_inference.workers.model.grid import ends_on_grid
from barrel_inference.workers.model.job import Job, Stage
from barrel_inference.workers.model.placement import Abilities
from barrel_inference.workers.model.restore import Restore
from barrel_inference.workers.model.sequences import Sequence_, SequenceTable

# Ends a request wherever it stands: with a reason (`stop`, `length`, `cancelled`), or with an error.
End = Callable[[Job, str | None, BarrelError | None], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler was told at load."""

    policy: Policy
    prefill_chunk: int
    warm_cells: int
    deterministic: bool
    block_tokens: int
    decode_budget_ms: int = 0

    @property
    def grid_tokens(self) -> int:
        """The grid of a deterministic context, see `grid`; 0 = there is none."""
        return self.block_tokens if self.deterministic else 0


@dataclass(slots=True)
class State:
    """The state of one model."""

    engine: Engine
    limits: Limits
    context: Context
    able: Abilities
    waiting: list[Job] = field(default_factory=list)  # queued, resolving, placing; in order of arrival
    running: dict[int, Job] = field(default_factory=dict)  # by sequence
    found: dict[str, Found] = field(default_factory=dict)  # by request, until it is placed
    restores: dict[int, Restore] = field(default_factory=dict)  # by sequence
    active_sessions: set[tuple[str, bytes]] = field(default_factory=set)

    @classmethod
    def of(cls, engine: Engine, limits: Limits) -> "State":
        """The state of a model that was just loaded."""
        info = engine.info
        able = Abilities(
            can_share=not info.needs_snapshot and info.has_cells and not limits.deterministic,
            can_cut=engine.can_cut,
            min_reuse_tokens=limits.policy.min_reuse_tokens,
            grid_tokens=limits.grid_tokens,
        )
        return cls(engine, limits, Context(engine), able)

    @property
    def table(self) -> SequenceTable:
        """Which sequence holds what."""
        return self.context.table

    def jobs(self) -> Iterator[Job]:
        """Every request that has not ended; it may end while you look."""
        return iter([*self.waiting, *self.running.values()])

    def computing(self) -> list[Job]:
        """The requests that have rows for the next call."""
        return [job for job in self.running.values() if job.stage in (Stage.PREFILLING, Stage.GENERATING)]

    def keeps_logits(self, job: Job) -> bool:
        """Is the row after this request's prompt kept, so that the identical prompt needs no decode?"""
        is_needed = ends_on_grid(job.prompt_tokens, self.limits.grid_tokens)
        return self.engine.info.cacheable and (self.limits.policy.store_logits or is_needed)

    def leave(self, s: Sequence_) -> None:
        """The request of a sequence stops running, in the middle of a restore too."""
        del self.running[s.id]
        if (restore := self.restores.pop(s.id, None)) is not None:
            restore.close()
