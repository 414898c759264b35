"""How long a call has taken (workers/model/call_age.py)."""

from barrel_inference.workers.model.call_age import LATE_LOOK_S, CallAge


def test_age_of_a_call() -> None:
    """None is 0; one counts from its beginning."""
    age = CallAge(100.0)
    assert [age.at(100.0 + n, 0.0) for n in (1, 2)] == [0.0, 0.0]
    assert [age.at(102.0 + n, 102.0) for n in (0, 1, 3.5)] == [0.0, 1.0, 3.5]


def test_time_that_everything_stood_still_does_not_count() -> None:
    """After a long time without a look the call has its whole budget again."""
    age = CallAge(100.0)
    assert age.at(101.0, 100.5) == 0.5
    assert age.at(5000.0, 100.5) == 0.0
    assert age.at(5000.0 + LATE_LOOK_S, 100.5) == LATE_LOOK_S
    assert age.at(5000.0 + LATE_LOOK_S + 1, 5003.0) == 1.0
