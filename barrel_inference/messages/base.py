"""What all messages are made of: header, route, error, limits, and the values that several share. Pure."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec

VERSION = 1

# One prompt is at most 64 MiB of text; anything larger is refused by size before it is parsed.
MAX_MESSAGE_BYTES = 80 * 1024 * 1024
MAX_TEXT_BYTES = 64 * 1024 * 1024

# Alternatives per token. All of a large vocabulary, for every token of a reply, would fill the memory of model and client.
MAX_LOGPROBS = 100

# Events a client is ready to take; it renews when half is used. Numbers: docs/explanation/messages.md
CREDIT_EVENTS = 32

# A reader sees 20 events per second as a steady flow; each one more would cost the model's cores wake-ups.
EVENT_INTERVAL_MS = 50
MAX_EVENT_INTERVAL_MS = 10_000

Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Count = Annotated[int, msgspec.Meta(ge=0)]

# msgspec knows no union of text and bytes: it decodes these fields as they come, and `__post_init__` checks them.
if TYPE_CHECKING:
    TextOrBytes: TypeAlias = str | bytes
    Prompt: TypeAlias = str | bytes | list[int]
else:
    TextOrBytes = Prompt = Any


def check_prompt(name: str, value: object, *, ids: bool = True) -> None:
    """Raise ValueError unless `value` is text, bytes or (where allowed) token ids."""
    if isinstance(value, (str, bytes)) or (
        ids and isinstance(value, list) and all(type(item) is int for item in value)
    ):
        return
    raise ValueError(f"{name} is neither text nor bytes{' nor a list of token ids' if ids else ''}")


class Kind(StrEnum):
    """What a frame set is."""

    CALL = "call"
    CAST = "cast"
    EVENT = "event"
    DONE = "done"
    ERROR = "error"


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Second frame of every message, a msgpack array."""

    version: int
    kind: Kind
    verb: str  # call, cast: names the body's type; event: the event's kind; done, error: ""
    request_id: Annotated[str, msgspec.Meta(max_length=100)] = ""
    number: Count = 0  # of an event, done or error within its request, from 0
    deadline_ms: Count = 0  # call: how long the caller still waits, counted from arrival; 0 = for ever
    credit: Count = 0  # call: events the caller is ready to take; 0 = it takes none


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every body."""


class Route(Message, frozen=True, array_like=True):
    """Where the router sends an answer, and who asked."""

    client: bytes
    tenant: str = ""  # set by the router from the socket, never by the client


class Ok(Message, frozen=True):
    """The empty reply."""


class ErrorBody(Message, frozen=True):
    """Body of an `error` message."""

    code: str
    message: str
    hint: str | None = None
    retryable: bool = False
    details: dict[str, Any] = {}


class Tier(StrEnum):
    """The kinds of cache tier, fastest first."""

    RAM = "ram"
    RAM_FILE = "ram_file"
    DISK = "disk"


class SaveReason(StrEnum):
    """Why a prefix was saved."""

    COLD = "cold"
    CONTINUED = "continued"
    FINISH = "finish"
    EVICT = "evict"
    SHUTDOWN = "shutdown"
    AGENT_PREFIX = "agent_prefix"


class HitKind(StrEnum):
    """How a request's prefix was found."""

    EXACT = "exact"
    PARTIAL = "partial"
    COLD = "cold"
    STICKY = "sticky"
    CONTINUATION = "continuation"


class Phase(StrEnum):
    """What a model is doing, for observers."""

    LOADING = "loading"
    IDLE = "idle"
    PREFILLING = "prefilling"
    GENERATING = "generating"
    RESTARTING = "restarting"
    FAILED = "failed"


class Namespace(Message, frozen=True, array_like=True):
    """The fields of a cache key before the text; they bound everything that is shared (design: docs/explanation/keys.md)."""

    fingerprint: bytes
    quant: str
    ctx_params_hash: bytes
    salt: bytes = b""


class Location(Message, frozen=True, array_like=True):
    """Where one copy of a node lies. `offset` is used by arenas, `name` by file tiers."""

    server: str  # id of the tier process, e.g. "tier:ram"
    incarnation: int  # of that process; an arena of another incarnation no longer exists
    size_bytes: Count  # the whole image, header included
    offset: int = 0
    name: str = ""  # path relative to the tier's root
