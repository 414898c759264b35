"""From a caller's arguments to a request, with every mistake that can be seen here reported here. Pure."""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar, cast

import msgspec

from barrel_inference import protocol
from barrel_inference.errors import InvalidArgument
from barrel_inference.protocol import Complete, Sampling

Prompt: TypeAlias = str | bytes | Sequence[int]
Messages: TypeAlias = Sequence[Mapping[str, Any]]
M = TypeVar("M", bound=protocol.Message)


class SamplingOptions(TypedDict, total=False):
    """How the next token is chosen. `temperature` 0 is greedy."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int | None
    grammar: str | None
    json_schema: str | Mapping[str, Any] | None
    logit_bias: Mapping[int, float]
    logprobs: int


class ContinueOptions(SamplingOptions, total=False):
    """The options of a request that appends to a session."""

    response_tokens: int | None  # None: the room that is left
    stop_sequences: Sequence[str]
    thinking: bool
    thinking_budget_tokens: int | None  # after so many the thinking is ended
    deadline_s: float | None
    parse_special: bool  # control tokens that the prompt spells out are such
    event_interval_ms: int  # of a stream: one event in each such interval, 0: one a token; whole replies: 250


class CompleteOptions(ContinueOptions, total=False):
    """The options of a request with a whole prompt."""

    parent_key: bytes | None  # `finish_key` of the turn before: a shortcut, never a condition
    session_id: str | None  # keeps the state in the model under this name
    on_full: str  # no sequence is free: `block` waits, `error` is `seq_capacity`
    prefix_checkpoint_len: int | None  # tokens of a head that many prompts share: saved by itself, and kept longest


_SAMPLING = frozenset(Sampling.__struct_fields__)
_OPTIONS = frozenset(CompleteOptions.__annotations__) | {"expect_committed"}


def build(
    mode: str, prompt: Prompt, options: Mapping[str, Any], *,
    messages: Messages | None = None, tools: Sequence[Mapping[str, Any]] | None = None,
) -> Complete:  # fmt: skip
    """The request.

    Args:
        options: those of `CompleteOptions`; `deadline_s` travels in the header and is only checked here.

    Raises:
        InvalidArgument: names the option and its value.
    """
    for name in options:
        if name not in _OPTIONS:
            close = difflib.get_close_matches(name, _OPTIONS, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(_OPTIONS))}"
            raise InvalidArgument(f"there is no option {name!r}", hint=hint, option=name)
    check_deadline(options.get("deadline_s"))
    given = {name: value for name, value in options.items() if name != "deadline_s"}
    sampling = {name: given.pop(name) for name in _SAMPLING & given.keys()}
    if isinstance(schema := sampling.get("json_schema"), Mapping):
        sampling["json_schema"] = json.dumps(schema)
    if isinstance(stops := given.get("stop_sequences"), str):
        given["stop_sequences"] = [stops]
    elif stops is not None:
        given["stop_sequences"] = list(stops)
    _check_numbers(sampling)
    if given.get("on_full", "block") not in ("block", "error"):
        raise InvalidArgument(f"on_full = {given['on_full']!r} is neither 'block' nor 'error'", option="on_full")
    if "" in given.get("stop_sequences", ()):
        raise InvalidArgument("stop_sequences has an empty text, which would stop everything", option="stop_sequences")
    given |= {"mode": mode, "sampling": sampling}
    if messages is not None:
        if not messages:
            raise InvalidArgument("messages is empty", hint="send at least one message", option="messages")
        given |= {
            "messages": [dict(message) for message in messages],
            "tools": tools and [dict(tool) for tool in tools],
        }
    else:
        given["prompt"] = checked_prompt(prompt, may_be_empty=mode == "continue")
    return convert(given, Complete)


def convert(values: dict[str, Any], cls: type[M]) -> M:
    """`values` as a message; msgspec's complaint becomes an `InvalidArgument` that names the option."""
    try:
        return msgspec.convert(values, cls, builtin_types=(bytes,))
    except msgspec.ValidationError as bad:
        what, _, path = str(bad).partition(" - at `$.")
        option = path.rstrip("`").removeprefix("sampling.")
        found: Any = values | values.get("sampling", {})
        value = found.get(option.split("[")[0].split(".")[0]) if option else None
        text = f"{option} = {value!r} is wrong: " if option else ""
        raise InvalidArgument(f"{text}{what[:1].lower()}{what[1:]}", option=option) from None


def checked_prompt(prompt: Prompt, *, may_be_empty: bool = False, name: str = "prompt") -> str | bytes | list[int]:
    """The prompt as it travels, or why it cannot."""
    sent: str | bytes | list[int]
    if isinstance(prompt, bytes):
        sent, length_bytes = prompt, len(prompt)
    elif isinstance(prompt, str):
        sent, length_bytes = prompt, _utf8_bytes(prompt, name)
    elif isinstance(prompt, Sequence):
        sent, length_bytes = list(cast(Sequence[int], prompt)), 0
        if sent and not (set(map(type, sent)) == {int} and 0 <= min(sent) <= max(sent) < 2**31):
            wrong = next(token for token in sent if type(token) is not int or not 0 <= token < 2**31)
            raise InvalidArgument(f"{name} has {wrong!r}, which is no token id", option=name)
    else:
        raise InvalidArgument(
            f"{name} is a {type(prompt).__name__}", hint="give text, bytes or a list of token ids", option=name
        )
    if length_bytes > protocol.MAX_TEXT_BYTES:
        raise InvalidArgument(f"{name} has {length_bytes} bytes, the limit is {protocol.MAX_TEXT_BYTES}", option=name)
    if not sent and not may_be_empty:
        raise InvalidArgument(f"{name} is empty", hint="send at least one token", option=name)
    return sent


def _utf8_bytes(text: str, name: str) -> int:
    if len(text) > protocol.MAX_TEXT_BYTES:
        return len(text)  # at least that many
    try:
        return len(text.encode())
    except UnicodeEncodeError as bad:
        raise InvalidArgument(
            f"{name} is no valid text at character {bad.start} (a lone surrogate)", hint="send bytes", option=name
        ) from None


def check_deadline(deadline_s: float | None, name: str = "deadline_s") -> None:
    """Refuse a deadline that is no positive number of seconds."""
    if deadline_s is None:
        return
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, (int, float)) or not 0 < deadline_s < 1e7:
        raise InvalidArgument(f"{name} = {deadline_s!r} is no positive number of seconds", option=name)


def _check_numbers(sampling: Mapping[str, Any]) -> None:
    for name, value in sampling.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidArgument(f"{name} = {value!r} is no finite number", option=name)
