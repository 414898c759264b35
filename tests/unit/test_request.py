"""From a caller's arguments to a request (barrel_inference/request.py)."""

import json
from typing import Any

import pytest

from barrel_inference.errors import InvalidArgument
from barrel_inference.protocol import MAX_TEXT_BYTES, Complete
from barrel_inference.request import Prompt, build


def test_options_find_their_place() -> None:
    """Sampling options and others may be mixed; what was not given keeps its default."""
    request = build(
        "complete", "hi",
        {"temperature": 0.7, "top_k": 40, "seed": 42, "response_tokens": 3, "stop_sequences": ("a", "b"), "deadline_s": 5.0},
    )  # fmt: skip
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.7, 40, 42)
    assert (request.response_tokens, request.stop_sequences, request.on_full) == (3, ["a", "b"], "block")


@pytest.mark.parametrize("prompt", ["text", b"\xff\x00", [1, 2], (1, 2), range(1, 3)])
def test_prompts(prompt: Prompt) -> None:
    """A prompt is text, bytes, or any sequence of token ids."""
    sent = build("complete", prompt, {}).prompt
    assert sent == (prompt if isinstance(prompt, (str, bytes)) else [1, 2])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -1}, "temperature = -1"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_p": 0}, "top_p = 0"),
        ({"seed": 2**40}, "seed"),
        ({"response_tokens": -1}, "response_tokens = -1"),
        ({"response_tokens": 1.5}, "response_tokens = 1.5"),
        ({"parent_key": b"short"}, "parent_key"),
        ({"session_id": ""}, "session_id = ''"),
        ({"on_full": "wait"}, "on_full = 'wait'"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"deadline_s": 0}, "deadline_s = 0"),
        ({"tempurature": 1}, "did you mean 'temperature'"),
    ],
)
def test_bad_option(options: dict[str, Any], named: str) -> None:
    """A bad option is refused before anything is sent, with its name and value."""
    with pytest.raises(InvalidArgument) as caught:
        build("complete", "hi", options)
    assert named in str(caught.value)


@pytest.mark.parametrize("prompt", ["", b"", [], [1, "2"], [-1], [True], 5, "x" * (MAX_TEXT_BYTES + 1), "a\udc80"])
def test_bad_prompt(prompt: Any) -> None:
    """A prompt that is empty, too long, or no prompt at all is refused."""
    with pytest.raises(InvalidArgument, match="prompt"):
        build("complete", prompt, {})


def test_continuation_may_be_empty() -> None:
    """Continuing with nothing appended generates on."""
    assert build("continue", [], {"session_id": "s"}).prompt == []


def test_chat() -> None:
    """A chat carries its messages and tools instead of a prompt; none at all is refused."""
    request = build("complete", "", {}, messages=[{"role": "user", "content": "hi"}], tools=[{"name": "f"}])
    assert (request.messages, request.tools, request.prompt) == (
        [{"role": "user", "content": "hi"}],
        [{"name": "f"}],
        "",
    )
    with pytest.raises(InvalidArgument, match="messages"):
        build("complete", "", {}, messages=[])


def test_json_schema_may_be_a_mapping() -> None:
    """A schema is given as a mapping or as JSON text; a stop sequence alone needs no list."""
    request = build("complete", "hi", {"json_schema": {"type": "object"}, "stop_sequences": "end"})
    assert request.sampling.json_schema is not None
    assert json.loads(request.sampling.json_schema) == {"type": "object"}
    assert request.stop_sequences == ["end"]


def test_defaults() -> None:
    """No options: greedy, to the end of the room, nothing special."""
    assert build("complete", "hi", {}) == Complete(prompt="hi")
