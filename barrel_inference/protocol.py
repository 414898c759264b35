"""The messages: what each process says to which, as frozen values. Pure.

Every message has three frames: route, header, body. The header is a `Header`; the body is one of the structs below, as a
msgpack map. `CALLS` and `CASTS` map the header's verb to the body's type. A call gets one reply (`done` or `error`),
or numbered events that end with exactly one of them. A cast gets nothing.

Route: empty between processes. From a client it is the target's id (`router`, `model:tiny`); from the router to a worker
it is an encoded `Route`, which the worker returns unopened in every answer.

Reading order: header, shared values, then by the process that answers: supervisor, router, model, index, tier, writer,
pressure.
"""

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

# A reader sees 40 events per second as a steady flow; each one more would cost the model's cores wake-ups.
EVENT_INTERVAL_MS = 25
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


# --- shared values -------------------------------------------------------------------------------------------------


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


# --- every child and the supervisor -----------------------------------------------------------------------------------


class ChildSpec(Message, frozen=True):
    """What the supervisor has to know to run one child."""

    id: Id
    module: str  # started as `python -P -m module id`
    boot: dict[str, Any] = {}  # given to the child as part of its boot document
    restart: str = "permanent"  # permanent, transient (not after exit 0), temporary (never)
    shutdown_ms: Count = 5000  # from SIGTERM to SIGKILL
    ready_ms: Count = 30_000  # longer than this without `Ready` is a failed start; 0 = no limit
    group: str = "helper"  # helper: counts in the tree's restart window; model: has its own
    niceness: int = 0
    environment: dict[str, str] = {}
    essential: bool = False  # True: when it is failed, the whole runtime is


class Hello(Message, frozen=True):
    """Child → supervisor, first message: I am connected."""

    id: Id
    incarnation: int
    pid: int


class Ready(Message, frozen=True):
    """Child → supervisor: I serve from now on. `about` is handed to every peer in `Up`."""

    incarnation: int
    about: dict[str, Any] = {}


class Beat(Message, frozen=True):
    """Child → supervisor, every 2 s."""

    incarnation: int
    loop_age_ms: Count  # since the main loop's last turn
    call_age_ms: Count = 0  # model: time inside the current llama.cpp call, 0 = in none
    call_budget_ms: Count = 0  # model: how long that call may take, 0 = any time


class CannotStart(Message, frozen=True):
    """Child → supervisor: starting me again will not help."""

    incarnation: int
    error: ErrorBody


class Up(Message, frozen=True):
    """Supervisor → children: this one serves now."""

    id: Id
    incarnation: int
    pid: int
    group: str
    about: dict[str, Any]


class Down(Message, frozen=True):
    """Supervisor → children: this incarnation is dead; release what it held."""

    id: Id
    incarnation: int
    reason: str
    restarting: bool  # False: stopped on purpose, or failed for good


class StartChild(Message, frozen=True):
    """Call to the supervisor; done (`Ok`) when the child is ready, error with its reason when it failed."""

    spec: ChildSpec


class StopChild(Message, frozen=True):
    """Call to the supervisor; done when the process is reaped and its specification forgotten."""

    id: Id


class RestartChild(Message, frozen=True):
    """Call to the supervisor: stop and start; done when ready again."""

    id: Id


class StopTree(Message, frozen=True):
    """Call to the supervisor: stop everything; done just before it exits."""


class Reload(Message, frozen=True):
    """Call to the supervisor: read the configuration again; what can change while everything runs does."""


class Reloaded(Message, frozen=True):
    """Reply to `Reload`: dotted keys that changed and hold now, and those that wait for a restart of the runtime."""

    changed: list[str]
    pending: list[str]


class Reconfigured(Message, frozen=True):
    """Supervisor → children, cast: the settings from now on, whole."""

    settings: dict[str, Any]


class TreeStatus(Message, frozen=True):
    """Call to the supervisor: one row per child."""


class ChildRow(Message, frozen=True):
    """One child as the supervisor sees it."""

    id: Id
    group: str
    state: str  # starting, ready, stopping, backoff, failed
    incarnation: int
    pid: int | None = None
    restarts: int = 0
    uptime_s: float = 0.0
    reason: str | None = None  # of the last exit, or why it failed
    error: ErrorBody | None = None


class TreeRows(Message, frozen=True):
    """Reply to `TreeStatus`."""

    supervisor_pid: int
    children: list[ChildRow]


# --- router: clients and observers --------------------------------------------------------------------------------------


class Greet(Message, frozen=True):
    """First call of a client."""

    version: int = VERSION


class Greeting(Message, frozen=True):
    """Reply to `Greet`."""

    version: int
    incarnation: int
    max_message_bytes: int
    max_text_bytes: int


class LoadModel(Message, frozen=True):
    """Load a model; `load_progress` events (`LoadProgress`), then `Loaded`. `options` are the load options by name."""

    model_id: str | None = None
    options: dict[str, Any] = {}
    force: bool = False  # load although the memory estimate says that it does not fit
    dry_run: bool = False  # only check the options and estimate the memory


class LoadProgress(Message, frozen=True):
    """Model → supervisor, cast, and from there by way of the router to the caller as the event `load_progress`."""

    fraction: float
    stage: str = "loading"
    model_id: str = ""  # set by the model; the router knows who waits


class Loaded(Message, frozen=True):
    """Reply to `LoadModel`."""

    model_id: str
    estimate: dict[str, int] = {}


class Unload(Message, frozen=True):
    """Call: done when the shutdown save is over and the process is gone."""

    model_id: str
    if_idle: bool = False  # True: refused (`overloaded`) while a request runs or waits


class ModelRow(Message, frozen=True):
    """Model → router: the observers' row, sent when it changes. Reply rows of `Models` have the same fields."""

    model_id: str
    incarnation: int
    backend: str
    phase: Phase
    pending_len: int  # waiting
    running: int
    last_cache_hit: dict[str, Any] | None  # {"kind", "prefix_tokens"}
    context_size: int
    quant_type: str
    quant_bits: int
    fingerprint: bytes
    tier: str
    n_seq_max: int
    available_seqs: int
    pinned_idle_seqs: int
    memory_bytes: dict[str, int]
    loaded_at: float
    last_used_unix_s: float = 0.0
    restarts: int = 0
    reason: str | None = None
    tokens_per_s: float = 0.0
    threads: int = 0


class Models(Message, frozen=True):
    """Call: every model's row; or one, or `not_found`."""

    model_id: str | None = None


class ModelRows(Message, frozen=True):
    """Reply to `Models`."""

    models: list[ModelRow]


class Status(Message, frozen=True):
    """Call: the whole runtime at a glance."""


class StatusReply(Message, frozen=True):
    """Reply to `Status`."""

    version: str
    uptime_s: float
    runtime_dir: str
    state_dir: str
    log_dir: str
    children: list[ChildRow]
    supervisor_pid: int
    models: list[ModelRow]
    tiers: list[dict[str, Any]]
    pressure: dict[str, Any] | None
    cores: int


class RequestEnded(Message, frozen=True):
    """Model → router: statistics of one finished request, for `top` and metrics. Holds no text."""

    model_id: str
    request_id: str
    stats: dict[str, Any]


class RecentRequests(Message, frozen=True):
    """Call to the router: the last finished requests, newest first."""

    limit: int = 20


class RecentRows(Message, frozen=True):
    """Reply to `RecentRequests`."""

    requests: list[dict[str, Any]]


# --- model ----------------------------------------------------------------------------------------------------------------


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


# --- index ------------------------------------------------------------------------------------------------------------------


class Lookup(Message, frozen=True):
    """Call by a model: the longest stored prefix of `text` in a namespace.

    The reply claims its nodes until `CheckIn`, or until the caller's incarnation is down.
    """

    namespace: Namespace
    model_id: str
    text: bytes  # the rendered bytes of the prompt
    parent_key: Key | None = None
    wait_ms: Count = 0  # for an in-flight save of `parent_key`
    live_tokens: Count = 0  # what the caller has of the prompt; a save of no more is not waited for


class MatchedNode(Message, frozen=True):
    """One node on the path from the root, in order."""

    key: Key
    start_tokens: Count  # position of its first token
    token_ids: bytes  # u32 little-endian, one per token
    text_bytes: Count  # rendered bytes of this node
    matched_bytes: Count  # of those, how many are in the prompt; less than all in the last node only
    snapshot: bool  # holds the recurrent or window state at its end
    copies: list[Location]  # fastest first


class Match(Message, frozen=True):
    """Reply to `Lookup`: the path of nodes whose bytes the prompt shares; empty = nothing."""

    claim: int  # 0 = nothing claimed
    nodes: list[MatchedNode]
    via: str  # exact (whole-prompt key), parent (parent_key), longest, none
    miss_reason: str | None = None  # no_entry, diverged, index_rebuilding, ...
    divergence_byte: int | None = None  # first byte where the nearest stored text differs from the prompt
    parent_tokens: int = 0  # via parent: tokens that `parent_key` stands for


class CheckIn(Message, frozen=True):
    """Cast by a model: the claim is dropped; what became of it."""

    claim: int
    used_keys: list[Key] = []  # restored: their hits and recency move
    corrupt: list[tuple[Key, str]] = []  # (key, tier server): unreadable there; that copy goes


class SavePlan(Message, frozen=True):
    """Call by a model, before a save: which part of these tokens is stored as a chain of whole nodes already?"""

    namespace: Namespace
    token_ids: bytes  # u32 little-endian, the sequence from its start
    token_bytes: bytes  # u32 little-endian: the rendered length of each token
    text: bytes
    server: str = ""  # count what that one holds only; empty = anywhere


class Planned(Message, frozen=True):
    """Reply to `SavePlan`.

    `nodes`: key and end of each stored node along the tokens, from the root, with the servers that hold a copy.
    `inside_key` names a stored child that goes on past the last token with the same tokens: the save needs a mark in it
    and no bytes.
    """

    nodes: list[tuple[bytes, int, list[str]]]
    inside_key: bytes | None = None


class NewNode(Message, frozen=True):
    """One node to be stored."""

    key: Key
    parent_key: Key | None
    start_tokens: Count
    token_ids: bytes
    token_bytes: bytes  # u32 little-endian: the rendered length of each token
    text: bytes
    size_bytes: Count  # the whole image
    reason: SaveReason
    snapshot: bool = False
    pinned: bool = False


class Reserve(Message, frozen=True):
    """Call by a model: room for these nodes, root first, in one tier. Answers are per node, in order."""

    namespace: Namespace
    model_id: str
    server: str
    nodes: list[NewNode]


class Grant(Message, frozen=True):
    """Answer for one node: `granted` (with token and location), `already_present`, `conflict` (being written by another),
    `no_parent`, `no_space` (quota or headroom), `tier_down`, `bad_key`."""

    status: str
    token: int = 0
    location: Location | None = None


class Grants(Message, frozen=True):
    """Reply to `Reserve`."""

    grants: list[Grant]


class Handed(Message, frozen=True):
    """Cast by a writer that was handed an image: from here on its save does not need the model any more."""

    token: int
    writer: str


class CheckReservation(Message, frozen=True):
    """Call by a writer before it links: is the token still ours? `not_found` if not.

    A token of an index that has died is good: whether its place is, the tier says at the publication.
    """

    token: int


class Publish(Message, frozen=True):
    """Call by whoever wrote the bytes: the node is complete. An unknown token is an adoption, checked by the tier's scan."""

    token: int
    location: Location
    adopted: bool = False  # an equal file was there already; its own header counts


class Abort(Message, frozen=True):
    """Cast: the reservations will not be published; `reason` as in the counters (`dropped`, `failed`)."""

    tokens: list[int]
    reason: str = "dropped"


class AddMark(Message, frozen=True):
    """Call by a model: name a point inside or at the end of a stored node. Pinned: at most one per namespace."""

    namespace: Namespace
    key: Key
    node_key: Key
    tokens: Count  # from the root
    reason: SaveReason
    pinned: bool = False


class Counted(Message, frozen=True):
    """Cast by anyone: counters to add."""

    deltas: dict[str, int]


class Counters(Message, frozen=True):
    """Call: every counter."""


class CounterValues(Message, frozen=True):
    """Reply to `Counters`."""

    counters: dict[str, int]


class Dump(Message, frozen=True):
    """Call: rows of the index (nodes and marks), newest use first."""

    limit: int = 0  # 0 = all
    tier: str | None = None  # a kind, or a server's id


class DumpRow(Message, frozen=True):
    """One row."""

    key: bytes
    parent_key: bytes | None
    model_id: str
    tier: str
    size_bytes: int
    tokens: int
    text_bytes: int
    status: str  # available, writing
    reason: str
    hits: int
    refcount: int
    pinned: bool
    age_s: float
    location: str
    first_words: str = ""  # of the prompt


class DumpRows(Message, frozen=True):
    """Reply to `Dump`."""

    rows: list[DumpRow]


class CacheStats(Message, frozen=True):
    """Call: per tier server, its kind, quota, bytes stored and reserved, rows."""


class TierStats(Message, frozen=True):
    """One tier server's figures."""

    server: str
    kind: str
    quota_bytes: int
    stored_bytes: int
    reserved_bytes: int
    rows: int
    up: bool
    note: str = ""  # why the quota was lowered, or why the tier takes nothing


class CacheStatsReply(Message, frozen=True):
    """Reply to `CacheStats`."""

    tiers: list[TierStats]
    namespaces: int
    nodes: int
    marks: int


class Evict(Message, frozen=True):
    """Call: free at least `bytes` (None: everything unpinned and unclaimed), the least valuable rows first, from the tiers
    named by kind or by their server's id (None: all)."""

    bytes: int | None = None
    tiers: list[str] | None = None


class Evicted(Message, frozen=True):
    """Reply to `Evict`."""

    rows: int
    bytes: int


# --- tiers ------------------------------------------------------------------------------------------------------------------


class StoredRow(Message, frozen=True):
    """One complete node as its image's header tells it: what a scan reports."""

    namespace: Namespace
    model_id: str
    key: Key
    parent_key: Key | None
    start_tokens: Count
    token_ids: bytes
    token_bytes: bytes
    text: bytes
    reason: SaveReason
    snapshot: bool
    created_unix_s: float
    last_used_unix_s: float
    hits: int
    marks: list[tuple[bytes, int, str, bool]]  # key, tokens from the root, reason, pinned
    pinned: bool
    location: Location


class Replay(Message, frozen=True):
    """Tier → index, call: the tier's complete rows, in batches after its start or the index's; `last` ends it."""

    server: str
    incarnation: int
    kind: Tier
    quota_bytes: int
    rows: list[StoredRow]
    leases: list[tuple[str, int, Location]]  # (owner id, owner incarnation, location) of images being written
    last: bool
    note: str = ""


class Quota(Message, frozen=True):
    """Tier → index, call: the quota has changed; what is stored above it has to go."""

    server: str
    incarnation: int
    quota_bytes: int
    note: str = ""


class Room(Message, frozen=True):
    """Index → tier, call: delete these, then make room for images of these sizes. One location per size, None = no space."""

    owner: str
    owner_incarnation: int
    deletes: list[Location]
    names: list[Key]
    sizes: list[int]
    give_back: bool = False  # True: deleted memory goes back to the system, not into the reuse pool


class Roomed(Message, frozen=True):
    """Reply to `Room`."""

    locations: list[Location | None]
    freed_bytes: int
    lacking_bytes: int = (
        0  # that would have to go for what got no place; 0: the medium takes nothing, or all was placed
    )


class Free(Message, frozen=True):
    """Index → tier, cast: these leased locations were given up."""

    locations: list[Location]


class Committed(Message, frozen=True):
    """Index → tier, cast: this leased location was published; it is a row now."""

    location: Location


class Touch(Message, frozen=True):
    """Index → tier, cast: recency, hits, marks and pin of a row, to be kept in the image's trailer."""

    location: Location
    last_used_unix_s: float
    hits: int
    marks: list[tuple[bytes, int, str, bool]]
    pinned: bool


class Lost(Message, frozen=True):
    """Tier → index, cast: these copies are gone or unreadable. `corrupt` counts in `corrupt_files`."""

    server: str
    keys: list[Key]
    corrupt: bool


class Adopt(Message, frozen=True):
    """Tier → index, call: a complete file found by the sweep that the index does not know."""

    row: StoredRow


# --- writer -------------------------------------------------------------------------------------------------------------------


class Write(Message, frozen=True):
    """Model → writer, call: publish this image in a file tier. Done (`Written`) when it is durable and in the index.

    The image lies in the model's staging arena (`<runtime dir>/<owner>.arena`, descriptor by SCM_RIGHTS) and is complete:
    header, payload and checksums.
    """

    token: int
    owner: str
    owner_incarnation: int
    offset: int
    size_bytes: int
    key: Key
    location: Location  # the tier, its incarnation and the file's name
    root: str


class Written(Message, frozen=True):
    """Reply to `Write`."""

    published: bool
    adopted: bool = False


# --- pressure -------------------------------------------------------------------------------------------------------------------


class PressureCommand(Message, frozen=True):
    """Call to the poller: one of status, sample, check, enable, disable, set_source, set_thresholds."""

    command: str
    source: str | None = None
    high: float | None = None
    low: float | None = None


class PressureReply(Message, frozen=True):
    """Reply: the fields of `pressure.status()`, or the reading of `sample`."""

    status: dict[str, Any]


# --- registries -----------------------------------------------------------------------------------------------------------------

# verb -> (body of the call, body of `done`)
CALLS: dict[str, tuple[type[Message], type[Message]]] = {
    "start_child": (StartChild, Ok),
    "stop_child": (StopChild, Ok),
    "restart_child": (RestartChild, Ok),
    "stop_tree": (StopTree, Ok),
    "tree_status": (TreeStatus, TreeRows),
    "reload": (Reload, Reloaded),
    "greet": (Greet, Greeting),
    "load_model": (LoadModel, Loaded),
    "unload": (Unload, Ok),
    "models": (Models, ModelRows),
    "status": (Status, StatusReply),
    "recent_requests": (RecentRequests, RecentRows),
    "complete": (Complete, Completed),
    "end_session": (EndSession, Ok),
    "tokenize": (Tokenize, TokenIds),
    "detokenize": (Detokenize, Text),
    "apply_template": (ApplyTemplate, TokenIds),
    "embed": (Embed, Vector),
    "set_adapters": (SetAdapters, AdapterList),
    "adapters": (Adapters, AdapterList),
    "release_idle": (ReleaseIdle, Evicted),
    "lookup": (Lookup, Match),
    "save_plan": (SavePlan, Planned),
    "reserve": (Reserve, Grants),
    "check_reservation": (CheckReservation, Ok),
    "publish": (Publish, Ok),
    "add_mark": (AddMark, Ok),
    "counters": (Counters, CounterValues),
    "dump": (Dump, DumpRows),
    "cache_stats": (CacheStats, CacheStatsReply),
    "evict": (Evict, Evicted),
    "replay": (Replay, Ok),
    "quota": (Quota, Ok),
    "room": (Room, Roomed),
    "adopt": (Adopt, Ok),
    "write": (Write, Written),
    "pressure": (PressureCommand, PressureReply),
}

CASTS: dict[str, type[Message]] = {
    "hello": Hello,
    "ready": Ready,
    "beat": Beat,
    "cannot_start": CannotStart,
    "up": Up,
    "down": Down,
    "reconfigured": Reconfigured,
    "model_row": ModelRow,
    "load_progress": LoadProgress,
    "request_ended": RequestEnded,
    "cancel": Cancel,
    "credit": Credit,
    "gone": Gone,
    "thread_share": ThreadShare,
    "check_in": CheckIn,
    "handed": Handed,
    "abort": Abort,
    "counted": Counted,
    "free": Free,
    "committed": Committed,
    "touch": Touch,
    "lost": Lost,
}

VERB_OF: dict[type[Message], str] = {body: verb for verb, (body, _) in CALLS.items()} | {
    body: verb for verb, body in CASTS.items()
}

# What clients may ask, by the group of the process that answers. Everything else is between processes.
CLIENT_VERBS: dict[str, frozenset[str]] = {
    "router": frozenset({"greet", "load_model", "unload", "models", "status", "recent_requests", "cancel"}),
    "supervisor": frozenset({"tree_status", "restart_child"}),
    "index": frozenset({"counters", "dump", "cache_stats", "evict"}),
    "pressure": frozenset({"pressure"}),
    "model": frozenset(
        {
            "complete", "cancel", "credit", "end_session", "tokenize", "detokenize", "apply_template", "embed",
            "set_adapters", "adapters",
        }
    ),
}  # fmt: skip

# Event kinds of `complete` and the type of their bodies.
EVENTS: dict[str, type[Message]] = {
    "token": TokenEvent,
    "thinking": TokenEvent,
    "thinking_end": TokenEvent,
    "tool_call": TokenEvent,
    "tool_call_end": TokenEvent,
    "progress": Progress,
    "load_progress": LoadProgress,
}
