"""The account of a stream's credit (barrel_inference/credit.py)."""

from hypothesis import given
from hypothesis import strategies as st

from barrel_inference.credit import Credit
from barrel_inference.protocol import CREDIT_EVENTS


def test_renewed_at_half() -> None:
    """Nothing is granted until half is used, then just what was used."""
    credit = Credit()
    assert credit.first_grant(0) == CREDIT_EVENTS
    grants = [credit.took(1) for _ in range(CREDIT_EVENTS)]
    assert [grant for grant in grants if grant] == [CREDIT_EVENTS // 2] * 2


def test_unread_events_of_an_earlier_attempt_grant_nothing() -> None:
    """Events that waited when the request was sent again are not paid for twice."""
    credit = Credit()
    credit.first_grant(20)
    assert credit.took(20) == 0
    assert credit.took(CREDIT_EVENTS // 2) == CREDIT_EVENTS // 2


@given(st.lists(st.integers(1, 40)))
def test_never_more_than_was_taken(taken: list[int]) -> None:
    """Whatever the reader's rhythm, the worker never holds more than the first grant."""
    credit = Credit()
    outstanding = credit.first_grant(0)
    for events in taken:
        events = min(events, outstanding)
        outstanding += credit.took(events) - events
        assert 0 <= outstanding <= CREDIT_EVENTS
