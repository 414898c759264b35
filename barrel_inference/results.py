"""What calls return: frozen values, readable by attribute and by key. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import msgspec

from barrel_inference import protocol

R = TypeVar("R", bound="Record")


class Record(Mapping[str, Any]):
    """A result: `row.size_bytes` and `row["size_bytes"]` are the same, and `dict(row)` is all of it."""

    __slots__ = ()

    def __getitem__(self, key: str) -> Any:
        if key in self.__dataclass_fields__:  # type: ignore[attr-defined]  # every subclass is a dataclass
            return getattr(self, key)
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(field.name for field in fields(self))  # type: ignore[arg-type]  # see above

    def __len__(self) -> int:
        return len(fields(self))  # type: ignore[arg-type]  # see above

    def __bool__(self) -> bool:
        return True


class Fields(dict[str, Any]):
    """What a process reports about itself: a dict whose keys can be read as attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def record_of(cls: type[R], message: msgspec.Struct | Mapping[str, Any], **more: Any) -> R:
    """A record with the fields of the same name of a message; `more` are fields that the message has not."""
    found = (
        message if isinstance(message, Mapping) else {key: getattr(message, key) for key in message.__struct_fields__}
    )
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]  # see above
    return cls(**{key: value for key, value in found.items() if key in names and key not in more}, **more)


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheDelta(Record):
    """What the cache gave and got."""

    read: int  # tokens of the reused prefix, the one that is decoded again for its logits included
    created: int  # tokens newly saved


@dataclass(frozen=True, slots=True)
class Completion(Record):
    """The end of a request."""

    reply: str  # bytes that are no UTF-8 are replaced
    reply_bytes: bytes
    generated: list[int]  # token ids
    context_tokens: list[int]  # token ids of the prompt and the reply
    committed_tokens: int  # their number
    finish_reason: str  # stop, length, cancelled
    stop_sequence: str | None  # the one that ended it
    finish_key: bytes | None  # of what was saved at the end, for `parent_key`; None: nothing was
    cache_hit_kind: str  # exact, partial, cold, sticky, continuation
    cache_delta: CacheDelta
    hit_source: str | None  # live, ram, ram_file, disk
    retokenised: bool  # what is stored splits the reused bytes into other tokens
    miss_reason: str | None  # why no more was reused
    divergence_byte: int | None  # where the prompt differs from what is stored
    prompt_tokens: int
    completion_tokens: int
    queue_ms: float
    restore_ms: float  # state brought back from the cache
    prefill_ms: float
    generation_ms: float
    ttft_ms: float  # to the first token, the wait included
    seed: int  # that gives the same draws again
    resubmitted: int  # how often a dead process was survived
    request_id: str
    logprobs: list[dict[str, Any]] | None = None

    @property
    def cancelled(self) -> bool:
        """Was it ended by a cancel?"""
        return self.finish_reason == "cancelled"


@dataclass(frozen=True, slots=True)
class StreamEvent(Record):
    """One piece of a stream."""

    kind: str  # token, thinking, thinking_end, tool_call, tool_call_end, done
    text: str = ""
    token_ids: tuple[int, ...] = ()
    result: Completion | None = None  # on done only
    data: bytes = b""  # the text's own bytes, also where they are no UTF-8


def completion_of(body: protocol.Completed, *, request_id: str, resubmitted: int) -> Completion:
    """The result as callers get it."""
    return record_of(
        Completion, body,
        reply=body.reply_bytes.decode("utf-8", "replace"),
        cache_delta=CacheDelta(read=body.cache_read, created=body.cache_created),
        resubmitted=resubmitted, request_id=request_id,
    )  # fmt: skip


def event_of(kind: str, body: protocol.TokenEvent) -> StreamEvent:
    """A piece of a stream as callers get it."""
    return StreamEvent(kind, body.data.decode("utf-8", "replace"), tuple(body.token_ids), None, body.data)


# --- models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelInfo(Record):
    """One model as observers see it."""

    model_id: str
    backend: str
    phase: str  # loading, idle, prefilling, generating, restarting, failed
    pending_len: int  # requests that wait
    running: int
    last_cache_hit: Fields | None  # kind, prefix_tokens
    context_size: int
    quant_type: str
    quant_bits: int
    fingerprint: bytes
    tier: str
    n_seq_max: int
    available_seqs: int
    pinned_idle_seqs: int
    memory_bytes: dict[str, int]  # weights, kv, compute
    loaded_at: float  # unix seconds
    last_used_unix_s: float
    restarts: int
    reason: str | None  # why it is restarting or failed
    tokens_per_s: float
    threads: int

    @property
    def status(self) -> str:
        """`running` while a request runs or waits, else `idle`."""
        return "running" if self.running or self.pending_len else "idle"


def model_info_of(row: protocol.ModelRow) -> ModelInfo:
    """An observers' row as callers get it."""
    return record_of(ModelInfo, row, last_cache_hit=Fields(row.last_cache_hit) if row.last_cache_hit else None)


# --- cache and pressure --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheRow(Record):
    """One row of the cache index: a node, or a mark in one."""

    key: bytes
    parent_key: bytes | None
    model_id: str
    tier: str
    size_bytes: int
    tokens: int  # of the prefix that it ends
    text_bytes: int
    status: str  # available, writing
    reason: str
    hits: int
    refcount: int
    pinned: bool
    age_s: float
    location: str
    first_words: str  # of the prompt


@dataclass(frozen=True, slots=True)
class TierInfo(Record):
    """One tier server's figures."""

    server: str
    kind: str
    quota_bytes: int
    stored_bytes: int
    reserved_bytes: int
    rows: int
    up: bool
    note: str


@dataclass(frozen=True, slots=True)
class CacheStats(Record):
    """The cache in numbers."""

    tiers: list[TierInfo]
    namespaces: int
    nodes: int
    marks: int


def cache_stats_of(body: protocol.CacheStatsReply) -> CacheStats:
    """The index's figures as callers get them."""
    return record_of(CacheStats, body, tiers=[record_of(TierInfo, tier) for tier in body.tiers])
