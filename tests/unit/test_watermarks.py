"""What a pass of the pressure poller does next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barrel_inference.errors import InvalidArgument
from barrel_inference.workers.watermarks import Action, Next, Pass, Reading, Rules, Watermarks, watermarks

MARKS = Watermarks(0.85, 0.75)


def rules(*, minimum: int = 0, may_evict: bool = True, may_unload: bool = False) -> Rules:
    """Rules with the default watermarks."""
    return Rules(MARKS, minimum, may_evict, may_unload)


def test_a_ratio_is_used_by_total() -> None:
    """42 of 100 is 0.42; of nothing, nothing is used."""
    assert Reading(42, 100).ratio == 0.42
    assert Reading(5, 0).ratio == 0.0


def test_thresholds_are_taken() -> None:
    """High above low, or both the same."""
    assert watermarks(0.92, 0.5) == Watermarks(0.92, 0.5)
    assert watermarks(0.8, 0.8) == Watermarks(0.8, 0.8)


@pytest.mark.parametrize(
    ("high", "low", "named"),
    [
        (0.5, 0.9, "low = 0.9 is above high = 0.5"), (1.5, 0.5, "high = 1.5"), (0.9, 0.0, "low = 0.0"),
        (0.9, -0.1, "low = -0.1"), (float("nan"), 0.5, "high = nan"), (None, 0.5, "high is missing"),
        (0.9, None, "low is missing"),
    ],
)  # fmt: skip
def test_wrong_thresholds_are_named(high: float | None, low: float | None, named: str) -> None:
    """A refusal says which watermark is wrong, with its value."""
    with pytest.raises(InvalidArgument, match=named):
        watermarks(high, low)


def test_below_high_nothing_happens() -> None:
    """Between the watermarks no pass begins."""
    assert Pass(rules()).begin(Reading(84, 100)) == Next(Action.END, result="below_high")


def test_at_high_enough_is_evicted_to_be_low() -> None:
    """A step asks for what is missing to be low, but for no more than a small part of the total, or the minimum."""
    assert Pass(rules()).begin(Reading(99, 100)) == Next(Action.EVICT, 4)
    assert Pass(Rules(Watermarks(0.85, 0.84), 0, True, False)).begin(Reading(85, 100)) == Next(Action.EVICT, 1)
    assert Pass(rules(minimum=50)).begin(Reading(85, 100)) == Next(Action.EVICT, 50)


def test_it_goes_on_until_low() -> None:
    """A step that was not enough is followed by one for the rest; at the low watermark it ends."""
    run = Pass(rules())
    step = run.begin(Reading(99, 100))
    step = run.after(step, Reading(77, 100), 22)
    assert step == Next(Action.EVICT, 2)
    assert run.after(step, Reading(75, 100), 2) == Next(Action.END, result="relieved")


def test_a_stall_costs_one_small_step_a_pass() -> None:
    """While every task waits for memory, a low reading is not the end of the matter, and not the cache's end either."""
    stalled = Reading(40, 100, stall_share=0.5)
    run = Pass(rules(minimum=3))
    step = run.begin(stalled)
    assert step == Next(Action.EVICT, 3)
    assert run.after(step, stalled, 3) == Next(Action.END, result="stalled")
    assert Pass(rules(may_evict=False, may_unload=True)).begin(stalled).result == "below_high"


def test_a_gpu_costs_models_and_no_rows() -> None:
    """What a GPU holds is freed by unloading alone, whatever may be evicted."""
    full = Reading(99, 100, is_gpu=True)
    assert Pass(rules()).begin(full).result == "exhausted"
    assert Pass(rules(may_unload=True)).begin(full).action is Action.UNLOAD


def test_two_steps_without_effect_end_it() -> None:
    """What is freed and not seen by the source twice in a row was freed in vain."""
    run = Pass(rules(may_unload=True))
    step = run.after(run.begin(Reading(99, 100)), Reading(99, 100), 24)
    assert step.action is Action.EVICT
    assert run.after(step, Reading(99, 100), 24) == Next(Action.END, result="no_effect")


def test_a_step_with_effect_forgives_one_without() -> None:
    """Only steps in a row count."""
    run = Pass(rules())
    step = run.begin(Reading(99, 100))
    for used in (99, 95, 95, 90):
        step = run.after(step, Reading(used, 100), 5)
        assert step.action is Action.EVICT


def test_an_empty_cache_exhausts_it() -> None:
    """With nothing to evict and no leave to unload it says so."""
    run = Pass(rules())
    assert run.after(run.begin(Reading(99, 100)), Reading(99, 100), 0) == Next(Action.END, result="exhausted")


def test_models_come_last() -> None:
    """Evict, release, evict what was saved, unload one, evict what it saved, unload the next."""
    run = Pass(rules(may_unload=True))
    step = run.begin(Reading(99, 100))
    for used, freed, then in (
        (99, 0, Action.RELEASE), (99, 2, Action.EVICT), (98, 1, Action.EVICT), (98, 0, Action.UNLOAD),
        (90, 1, Action.EVICT), (90, 0, Action.UNLOAD),
    ):  # fmt: skip
        step = run.after(step, Reading(used, 100), freed)
        assert step.action is then
    assert run.after(step, Reading(90, 100), 0) == Next(Action.END, result="exhausted")


def test_without_tiers_models_come_at_once() -> None:
    """With nothing to evict from, and without leave to unload, there is nothing that it could do."""
    assert Pass(rules(may_evict=False)).begin(Reading(99, 100)).result == "exhausted"
    run = Pass(rules(may_evict=False, may_unload=True))
    step = run.begin(Reading(99, 100))
    assert step.action is Action.RELEASE
    step = run.after(step, Reading(99, 100), 3)
    assert step.action is Action.UNLOAD
    assert run.after(step, Reading(50, 100), 1).result == "relieved"


@given(
    cached=st.lists(st.integers(1, 1000), max_size=30), other=st.integers(0, 5000), total=st.integers(1, 10_000),
    minimum=st.integers(0, 500),
)  # fmt: skip
def test_a_pass_ends_low_or_says_why(cached: list[int], other: int, total: int, minimum: int) -> None:
    """With a source that sees what is freed, it ends at or below low, or with nothing left, and never evicts below need."""
    rows = list(cached)
    run = Pass(rules(minimum=minimum))
    step = run.begin(Reading(other + sum(rows), total))
    while step.action is not Action.END:
        assert step.size_bytes > 0
        freed = 0
        while rows and freed < step.size_bytes:
            freed += rows.pop()
        step = run.after(step, Reading(other + sum(rows), total), freed)
    left = Reading(other + sum(rows), total).ratio
    match step.result:
        case "below_high":
            assert left < MARKS.high
        case "relieved":
            assert left <= MARKS.low
        case _:
            assert step.result == "exhausted"
            assert not rows
