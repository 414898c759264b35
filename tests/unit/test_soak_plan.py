"""How a failed round of a soak run is made smaller (tests/soak/plan.py)."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.soak.plan import MODELS, WEIGHTS, Plan, shrink, smaller

WHOLE = Plan(seed=7, number=3)

CAUSES: dict[str, tuple[Callable[[Plan], bool], Plan]] = {
    "one kind of trouble": (lambda p: "kill" in p.kinds, Plan(7, 3, 1, 1, ("kill",), MODELS[:1], ("stop",))),
    "two kinds together": (
        lambda p: {"kill", "damage"} <= {*p.kinds} and "real" in p.models,
        Plan(7, 3, 1, 1, ("kill", "damage"), ("real",), ("stop",)),
    ),
    "enough of everything": (lambda p: p.steps >= 15 and p.callers >= 3, replace(WHOLE, steps=15, callers=3)),
    "the way it ends": (lambda p: "kill" in p.ends, Plan(7, 3, 1, 1, ("kill",), MODELS[:1], ("kill",))),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_failure_is_made_smaller(cause: str) -> None:
    """What is left still fails, and nothing smaller does."""
    fails, expected = CAUSES[cause]
    found = shrink(WHOLE, fails, lambda: True)
    assert fails(found)
    assert not any(fails(plan) for plan in smaller(found))
    assert (found.steps, found.callers) == (expected.steps, expected.callers)
    if cause != "enough of everything":
        assert found == expected


def test_shrinking_ends_in_time() -> None:
    """When the time is over, the smallest one so far is the answer."""
    assert shrink(WHOLE, lambda _plan: True, lambda: False) == WHOLE


def test_a_round_is_named_by_its_command() -> None:
    """The command has everything that the plan has."""
    assert WHOLE.command().split()[3:] == [
        "--seed", "7", "--round", "3", "--steps", "60", "--callers", "6", "--kinds", ",".join(WEIGHTS),
        "--models", ",".join(MODELS), "--ends", "stop,term,kill",
    ]  # fmt: skip


def test_the_same_plan_draws_the_same() -> None:
    """Seed, round and person decide what is drawn."""
    drawn = [WHOLE.rng("x").random(), WHOLE.next().rng("x").random(), WHOLE.rng("y").random()]
    assert drawn[0] == Plan(seed=7, number=3, steps=5).rng("x").random()
    assert len(set(drawn)) == 3
