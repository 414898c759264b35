"""Restart accounting in served time."""

import pytest

from barrel_inference.supervisor.restarts import Intensity, RestartWindow, delay_s


@pytest.mark.parametrize(
    ("deaths_s", "now_s", "count"),
    [
        ([], 5.0, 0),
        ([1.0, 2.0, 3.0], 3.0, 3),
        ([1.0, 2.0, 3.0], 10.9, 3),
        ([1.0, 2.0, 3.0], 11.0, 2),  # a death leaves exactly one period after it
        ([1.0, 2.0, 3.0], 13.0, 0),
        ([0.2, 0.4, 0.6, 0.8], 0.8, 4),  # good starts between deaths clear nothing
    ],
)
def test_window_slides(deaths_s: list[float], now_s: float, count: int) -> None:
    """A death counts for one period of served time."""
    window = RestartWindow(period_s=10.0)
    for at_s in deaths_s:
        window.note(at_s)
    assert window.count(now_s) == count


@pytest.mark.parametrize(
    ("deaths", "max_s", "wait_s"), [(1, 5, 0.05), (2, 5, 0.1), (5, 5, 0.8), (8, 5, 5), (5000, 5, 5), (3, 0, 0)]
)
def test_delay_grows_and_is_capped(deaths: int, max_s: float, wait_s: float) -> None:
    """The delay doubles with each death that counts, up to the limit; a limit of 0 means none."""
    assert delay_s(deaths, max_s) == pytest.approx(wait_s)


@pytest.mark.parametrize(("max_restarts", "period_s"), [(-1, 1.0), (1, 0.0)])
def test_impossible_intensity(max_restarts: int, period_s: float) -> None:
    """A negative count or an empty period is refused."""
    with pytest.raises(ValueError, match="got"):
        Intensity(max_restarts, period_s)
