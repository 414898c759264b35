"""Whether a request is sent again after a death, and with what (barrel_inference/resubmission.py)."""

import pytest

from barrel_inference.errors import (
    BarrelError,
    ContextOverflow,
    ModelDown,
    ModelFailed,
    NoRuntime,
    NoSession,
    Overloaded,
)
from barrel_inference.protocol import Complete, Sampling
from barrel_inference.resubmission import (
    MAX_BYSTANDER_DEATHS,
    MAX_CONNECTION_LOSSES,
    MAX_MODEL_DEATHS,
    ConnectionLost,
    Delivered,
    Tally,
    after,
    resumed,
)

DIED = ModelDown("model 'tiny' died", accepted=True)
ON_ITS_WAY_UP = ModelDown("model 'tiny' is being restarted", accepted=False)


@pytest.mark.parametrize(
    ("failure", "tally"),
    [
        (DIED, Tally(model_deaths=1)),
        (ON_ITS_WAY_UP, Tally()),
        (ConnectionLost(), Tally(connection_losses=1)),
    ],
)
def test_sent_again(failure: BarrelError | ConnectionLost, tally: Tally) -> None:
    """After a death the request is sent again; a refusal because the model is on its way up counts as none."""
    assert after(failure, Tally(), retry=True) == tally


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (ContextOverflow("too long"), ContextOverflow),
        (Overloaded("full"), Overloaded),
        (ModelFailed("for good"), ModelFailed),
    ],
)
def test_other_errors_are_reported(failure: BarrelError, raised: type[BarrelError]) -> None:
    """Only deaths are survived: every other error is the caller's."""
    with pytest.raises(raised):
        after(failure, Tally(), retry=True)


@pytest.mark.parametrize(("failure", "raised"), [(DIED, ModelDown), (ConnectionLost(), NoRuntime)])
def test_retry_off(failure: BarrelError | ConnectionLost, raised: type[BarrelError]) -> None:
    """Without retry a death is one typed error that says it may be retried."""
    with pytest.raises(raised) as caught:
        after(failure, Tally(), retry=False)
    assert caught.value.retryable


def test_a_deadly_request_is_given_up() -> None:
    """A request whose model died each of three times gets model_down, not retryable."""
    tally = Tally()
    for _ in range(MAX_MODEL_DEATHS - 1):
        tally = after(DIED, tally, retry=True)
    assert tally.survived == 2
    with pytest.raises(ModelFailed) as caught:
        after(DIED, tally, retry=True)
    assert (caught.value.code, caught.value.retryable) == ("model_down", False)


def test_a_bystander_is_not_given_up() -> None:
    """A request that only waited in the models that died is not taken for the cause, and waits its turn again."""
    waited = ModelDown("model 'tiny' died", accepted=True, computing=False)
    tally = Tally()
    for _ in range(MAX_BYSTANDER_DEATHS):
        tally = after(waited, tally, retry=True)
    assert after(DIED, tally, retry=True).model_deaths == 1
    with pytest.raises(ModelDown):
        after(waited, tally, retry=True)


def test_an_admitted_request_is_not_refused_for_lack_of_room() -> None:
    """The second attempt waits for a sequence, whatever the first was to do: it had one."""
    assert resumed(Complete(prompt="Once", on_full="error"), Delivered(), Tally(1)).on_full == "block"


def test_lost_connections_are_no_fault_of_the_request() -> None:
    """Router deaths do not use up a request's three attempts, and are bounded too."""
    tally = Tally()
    for _ in range(MAX_CONNECTION_LOSSES):
        tally = after(ConnectionLost(), tally, retry=True)
    assert after(DIED, tally, retry=True).model_deaths == 1
    with pytest.raises(NoRuntime):
        after(ConnectionLost(), tally, retry=True)


def test_resume_says_what_was_delivered() -> None:
    """The second attempt carries the ids and bytes delivered and the seed in use; everything else is as it was."""
    request = Complete(prompt="Once", stop_sequences=["."], response_tokens=9)
    again = resumed(request, Delivered((5, 6), 7, seed=42), Tally(model_deaths=1))
    assert again.resume is not None
    assert (again.resume.attempt, again.resume.token_ids, again.resume.text_bytes, again.resume.seed) == (
        1,
        [5, 6],
        7,
        42,
    )
    assert (again.prompt, again.stop_sequences, again.response_tokens, again.mode) == ("Once", ["."], 9, "complete")


def test_nothing_delivered() -> None:
    """Without an event nobody knows a random seed, and nothing depends on it; a given seed is kept."""
    fresh = resumed(Complete(prompt="Once"), Delivered(), Tally(1)).resume
    assert fresh is not None
    assert (fresh.attempt, fresh.deaths, fresh.token_ids, fresh.seed) == (1, 1, [], None)
    seeded = resumed(Complete(prompt="Once", sampling=Sampling(seed=7)), Delivered(), Tally(1))
    assert seeded.resume is not None
    assert seeded.resume.seed == 7


def test_plain_continuation_is_lost() -> None:
    """Nobody knows what a continuation without expect_committed continued."""
    with pytest.raises(NoSession):
        resumed(Complete(mode="continue", prompt=[9], session_id="s"), Delivered(), Tally(1))


def test_checked_continuation_becomes_a_whole_prompt() -> None:
    """With expect_committed the tokens are known: the session is started anew with them and the suffix."""
    request = Complete(mode="continue", prompt="more", session_id="s", expect_committed=[1, 2])
    again = resumed(request, Delivered((4,), 1, seed=3), Tally(1), suffix_ids=[3])
    assert (again.mode, again.prompt, again.expect_committed, again.session_id) == ("complete", [1, 2, 3], None, "s")
