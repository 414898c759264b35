"""How fast a model generates, as observers see it, and what is told of a request that is over."""

import pytest

from barrel_inference.errors import DecodeFailed
from barrel_inference.protocol import Complete
from barrel_inference.workers.model.job import Job, Times
from barrel_inference.workers.model.reporting import RATE_WINDOW_S, Rate, completed, statistics
from barrel_inference.workers.model.text import Markers, Scanner


def test_nothing_counted_is_no_rate() -> None:
    """Before anything was noted, and at the instant of the first note, the rate is 0."""
    rate = Rate()
    assert rate.per_s(10, 1.0) == 0
    rate.note(10, 1.0)
    assert rate.per_s(10, 1.0) == 0


def test_rate_is_that_of_the_window() -> None:
    """A slow minute ago does not count; the last seconds do."""
    rate = Rate()
    for second in range(100):
        rate.note(second, float(second))
    for quarter in range(1, 41):
        rate.note(99 + 10 * quarter, 99 + quarter / 4)
    assert rate.per_s(99 + 400, 109.0) == pytest.approx(40, rel=0.01)


def test_a_stall_shows() -> None:
    """While nothing comes the rate falls, to 0 within a little more than the window."""
    rate = Rate()
    rate.note(0, 0.0)
    rate.note(100, 1.0)
    assert rate.per_s(100, 2.0) == 50
    for quarter in range(8, 8 + int(4 * RATE_WINDOW_S)):
        rate.note(100, quarter / 4)
    assert rate.per_s(100, 2.0 + RATE_WINDOW_S) == 0


def test_rest_begins_anew() -> None:
    """Idle time between two requests lowers nobody's rate."""
    rate = Rate()
    rate.note(0, 0.0)
    rate.rest()
    assert rate.per_s(5, 50.0) == 0
    rate.note(5, 100.0)
    assert rate.per_s(25, 101.0) == 20


def job() -> Job:
    """A request that was placed and has generated two tokens."""
    scanner = Scanner((), Markers(None, None), False)
    return Job(
        id="r", spec=Complete(prompt="secret words"), prompt=[1, 2, 3], salt=b"", seed=1, limit_tokens=2,
        scanner=scanner, times=Times(1.0), seq=0, generated=[4, 5], finish_reason="length", prompt_tokens=3,
    )  # fmt: skip


def test_statistics_hold_numbers_and_no_text() -> None:
    """What goes to logs and observers says how a request went, and nothing of what it said."""
    found = statistics(job(), completed(job(), (1, 2, 3, 4), b"k", 4), 7.0)
    assert (found["kind"], found["completion_tokens"], found["finish_reason"], found["code"]) == (
        "cold", 2, "length", None,
    )  # fmt: skip
    assert not any(isinstance(value, bytes) or "secret" in str(value) for value in found.values())


def test_failed_request_says_its_code() -> None:
    """A request that failed before it had a sequence was neither a hit nor a miss, and says why it failed."""
    failed = job()
    failed.seq, failed.error, failed.finish_reason = None, DecodeFailed("x"), None
    found = statistics(failed, completed(failed, (), None, 0), 7.0)
    assert (found["kind"], found["finish_reason"], found["code"]) == (None, "error", "decode_failed")
