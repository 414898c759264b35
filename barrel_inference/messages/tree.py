"""Between children and the supervisor. Pure."""

from typing import Any

from barrel_inference.messages.base import Count, ErrorBody, Id, Message


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


class ChangeBoot(Message, frozen=True):
    """Call to the supervisor, by a child about itself: the next incarnation starts with this `boot` part."""

    id: Id
    incarnation: int
    boot: dict[str, Any]


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
