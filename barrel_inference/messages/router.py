"""What the router answers: models, status, observers. Pure."""

from typing import Any

from barrel_inference.messages.base import VERSION, Message, Phase
from barrel_inference.messages.tree import ChildRow


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
