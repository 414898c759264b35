"""What one round of a campaign does, and how a round that failed is made smaller. Pure.

A round draws all its decisions from the campaign's seed and its own number, so the two name it. When things happen is the
machine's doing: a round that failed by a race may pass the next time.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

# What is done to a runtime, and how often in comparison with the rest.
WEIGHTS = {"kill": 12, "halt": 3, "starve": 2, "damage": 4, "evict": 2, "fuzz": 2, "load": 2}
MODELS = ("stub-ram", "stub-file", "stub-disk", "real")
# How a round ends while requests run: as everybody wishes, by SIGTERM, by the death of the supervisor.
ENDS = ("stop", "term", "kill")


@dataclass(frozen=True, slots=True)
class Plan:
    """One round."""

    seed: int
    number: int = 0
    steps: int = 60
    callers: int = 6
    kinds: tuple[str, ...] = tuple(WEIGHTS)
    models: tuple[str, ...] = MODELS
    ends: tuple[str, ...] = ENDS

    def rng(self, whose: str) -> random.Random:
        """The source of somebody's decisions in this round."""
        return random.Random(f"{self.seed} {self.number} {whose}")

    def next(self) -> "Plan":
        """The round after this one."""
        return replace(self, number=self.number + 1)

    def command(self) -> str:
        """What runs this round alone."""
        return (
            f"python -m tests.soak.soak --seed {self.seed} --round {self.number} --steps {self.steps} "
            f"--callers {self.callers} --kinds {','.join(self.kinds)} --models {','.join(self.models)} "
            f"--ends {','.join(self.ends)}"
        )


def smaller(plan: Plan) -> Iterator[Plan]:
    """Rounds that do less, those first that do much less."""
    yield from (replace(plan, kinds=parts) for parts in _fewer(plan.kinds))
    yield from (replace(plan, models=parts) for parts in _fewer(plan.models))
    yield from (replace(plan, ends=parts) for parts in _fewer(plan.ends))
    if plan.steps > 1:
        yield replace(plan, steps=plan.steps // 2)
    if plan.callers > 1:
        yield replace(plan, callers=plan.callers // 2)


def _fewer(parts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Each of several by itself, then all but one."""
    if len(parts) > 1:
        yield from ((part,) for part in parts)
    if len(parts) > 2:
        yield from (tuple(other for other in parts if other != part) for part in parts)


def shrink(plan: Plan, fails: Callable[[Plan], bool], may_go_on: Callable[[], bool]) -> Plan:
    """The smallest round found that still fails; `plan` is one that does."""
    for candidate in smaller(plan):
        if not may_go_on():
            return plan
        if fails(candidate):
            return shrink(candidate, fails, may_go_on)
    return plan
