"""What a model answers: requests and their events, text, adapters. Pure."""

from typing import Annotated, Any

import msgspec

from barrel_inference.messages.base import (
    EVENT_INTERVAL_MS,
    MAX_EVENT_INTERVAL_MS,
    MAX_LOGPROBS,
    Count,
    HitKind,
    Id,
    Key,
    Message,
    Prompt,
    TextOrBytes,
    check_prompt,
)


class Sampling(Message, frozen=True):
    """How the next token is chosen. `temperature` 0 is greedy."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    top_k: Count = 0  # 0 = off
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None = None
    grammar: str | None = None
    json_schema: str | None = None  # JSON text
    logit_bias: dict[int, float] = {}
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] = 0  # alternatives per token in the result; 0 = none


class Resume(Message, frozen=True):
    """What a resubmitted request has already delivered."""

    attempt: int
    token_ids: list[int]
    text_bytes: Count  # bytes of text events delivered
    seed: int | None  # None: no event told it
    span_ends: Count = 0  # events `thinking_end` and `tool_call_end` delivered
    deaths: Count = 0  # of a model while it computed this request


class Complete(Message, frozen=True):
    """Call to a model: prefill and generate. Events `token`, `thinking`, ... (`TokenEvent`), `progress`, then `Completed`."""

    mode: str = "complete"  # complete, continue (append to the session), prefill (generate nothing)
    prompt: Prompt = ""
    messages: list[dict[str, Any]] | None = None  # chat: rendered by the model's template instead of `prompt`
    tools: list[dict[str, Any]] | None = None
    response_tokens: Count | None = None
    parent_key: Key | None = None
    session_id: Id | None = None
    on_full: str = "block"  # block, error
    stop_sequences: list[str] = []
    sampling: Sampling = Sampling()
    thinking: bool = False
    thinking_budget_tokens: Count | None = None
    prefix_checkpoint_len: Count | None = None
    expect_committed: list[int] | None = None
    parse_special: bool = False
    # Events come at least that far apart; text in between shares one.
    event_interval_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_EVENT_INTERVAL_MS)] = EVENT_INTERVAL_MS
    resume: Resume | None = None

    def __post_init__(self) -> None:
        check_prompt("prompt", self.prompt)


class TokenEvent(Message, frozen=True):
    """Body of the events `token`, `thinking`, `thinking_end`, `tool_call`, `tool_call_end`.

    `data` is the text as bytes: whole UTF-8 characters, except for invalid bytes of the model's own.
    """

    data: bytes
    token_ids: list[int]
    seed: int | None = None  # first event only: the seed in use


class Progress(Message, frozen=True):
    """Event `progress`: at least once a second while a request is queued or runs."""

    phase: str  # queued, resolving, restoring, prefilling, generating
    done_tokens: int = 0
    total_tokens: int = 0
    position: int = 0  # in the queue


class Completed(Message, frozen=True):
    """Body of `done` for `Complete`; the fields are those of `Completion`."""

    reply_bytes: bytes
    generated: list[int]
    context_tokens: list[int]
    committed_tokens: int
    finish_reason: str  # stop, length, cancelled
    stop_sequence: str | None
    finish_key: bytes | None
    cache_hit_kind: HitKind
    cache_read: int
    cache_created: int
    hit_source: str | None  # live, ram, ram_file, disk
    retokenised: bool
    miss_reason: str | None
    divergence_byte: int | None
    prompt_tokens: int
    completion_tokens: int
    queue_ms: float
    restore_ms: float
    prefill_ms: float
    generation_ms: float
    ttft_ms: float
    seed: int
    logprobs: list[dict[str, Any]] | None = None


class Cancel(Message, frozen=True):
    """Cast, to the model or to the router, which knows who has the request. The answer is no longer wanted; unknown ids are fine."""

    request_id: str


class Credit(Message, frozen=True):
    """Cast: the caller is ready for that many more events."""

    request_id: str
    events: Count


class Gone(Message, frozen=True):
    """Router → model, cast: this client cannot be reached any more; its requests end."""

    client: bytes


class EndSession(Message, frozen=True):
    """Call to a model. `reset` also cancels what runs in the session; else a busy one is `sticky_busy`."""

    session_id: Id
    reset: bool = False


class Tokenize(Message, frozen=True):
    """Call to a model."""

    text: TextOrBytes
    add_special: bool = True
    parse_special: bool = False

    def __post_init__(self) -> None:
        check_prompt("text", self.text, ids=False)


class Detokenize(Message, frozen=True):
    """Call to a model."""

    ids: list[int]


class ApplyTemplate(Message, frozen=True):
    """Call to a model: chat messages to token ids, by the model's own template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True


class Embed(Message, frozen=True):
    """Call to a model."""

    prompt: Prompt

    def __post_init__(self) -> None:
        check_prompt("prompt", self.prompt)


class SetAdapters(Message, frozen=True):
    """Call to a model: waits until no request runs."""

    adapters: list[tuple[str, float]]


class Adapters(Message, frozen=True):
    """Call to a model."""


class TokenIds(Message, frozen=True):
    """Reply to `Tokenize` and `ApplyTemplate`."""

    ids: list[int]


class Text(Message, frozen=True):
    """Reply to `Detokenize`."""

    data: bytes


class Vector(Message, frozen=True):
    """Reply to `Embed`."""

    values: list[float]


class AdapterList(Message, frozen=True):
    """Reply to `Adapters` and `SetAdapters`."""

    adapters: list[tuple[str, float]]


class ReleaseIdle(Message, frozen=True):
    """Pressure → model, call: save (`evict`) and free idle pinned sessions and warm sequences."""


class ThreadShare(Message, frozen=True):
    """Router → model, cast: how many models compute now; threads follow from the next tick."""

    computing_models: int
