"""What calls return (barrel_inference/results.py)."""

import dataclasses

import pytest

from barrel_inference.protocol import Completed, HitKind, TokenEvent
from barrel_inference.results import Completion, completion_of, event_of


@pytest.fixture
def completion() -> Completion:
    """A finished request whose reply ends inside a character."""
    body = Completed(
        reply_bytes="né".encode()[:-1], generated=[7], context_tokens=[1, 7], committed_tokens=2, finish_reason="cancelled",
        stop_sequence=None, finish_key=None, cache_hit_kind=HitKind.PARTIAL, cache_read=1, cache_created=0,
        hit_source="live", retokenised=False, miss_reason="diverged", divergence_byte=3, prompt_tokens=1,
        completion_tokens=1, queue_ms=0.0, restore_ms=0.0, prefill_ms=1.0, generation_ms=1.0, ttft_ms=1.0, seed=9,
    )  # fmt: skip
    return completion_of(body, request_id="r", resubmitted=2)


def test_completion(completion: Completion) -> None:
    """A completion has the reply as text and as bytes, the cache's part, and what it survived."""
    assert (completion.reply, completion.reply_bytes) == ("n\ufffd", b"n\xc3")
    assert (completion.cache_delta.read, completion.cache_delta.created) == (1, 0)
    assert (completion.cache_hit_kind, completion.cancelled, completion.resubmitted) == ("partial", True, 2)


def test_by_attribute_and_by_key(completion: Completion) -> None:
    """A record is read by attribute or by key, becomes a dict, and stays as it is."""
    assert completion["seed"] == completion.seed == dict(completion)["seed"] == 9
    assert "reply" in completion
    assert completion.get("nonsense") is None
    with pytest.raises(KeyError):
        completion["nonsense"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        completion.seed = 1  # type: ignore[misc]


def test_event_text_is_always_text() -> None:
    """Bytes that are no UTF-8 are marked in the text and whole in the data."""
    event = event_of("token", TokenEvent(data=b"a\xff", token_ids=[1, 2]))
    assert (event.kind, event.text, event.data, event.token_ids, event.result) == (
        "token",
        "a\ufffd",
        b"a\xff",
        (1, 2),
        None,
    )
