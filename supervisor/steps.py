"""What the tree is told, and what it answers: events and commands. Pure."""

from dataclasses import dataclass, field
from typing import Any

from barrel_inference.protocol import ChildSpec, Down, ErrorBody, Up

# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Boot:
    """The first event: start these, in this order."""

    specs: tuple[ChildSpec, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """Someone wants this child; `call` is answered when it is ready or failed."""

    spec: ChildSpec
    call: int | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """Someone wants it gone; `call` is answered when it is."""

    id: str
    call: int | None = None


@dataclass(frozen=True, slots=True)
class Restart:
    """Someone wants it anew; `call` is answered when it is ready again."""

    id: str
    call: int | None = None


@dataclass(frozen=True, slots=True)
class StopAll:
    """Stop everything in reverse order; `at_once` without asking."""

    at_once: bool = False
    failure: str = ""  # why nobody can go on; a stop that was wished for has none


@dataclass(frozen=True, slots=True)
class Spawned:
    """The process of this incarnation exists."""

    id: str
    incarnation: int
    pid: int


@dataclass(frozen=True, slots=True)
class BecameReady:
    """The child serves from now on."""

    id: str
    incarnation: int
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BootChanged:
    """The child wants its next incarnation to start with this; `call` is answered at once."""

    id: str
    incarnation: int
    boot: dict[str, Any]
    call: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The child says that starting it again will not help; its exit follows."""

    id: str
    incarnation: int
    error: ErrorBody


@dataclass(frozen=True, slots=True)
class Alive:
    """A beat. Times as in `protocol.Beat`."""

    id: str
    incarnation: int
    call_age_ms: int = 0
    call_budget_ms: int = 0


@dataclass(frozen=True, slots=True)
class Exited:
    """The process is gone and reaped. `status` is 0 for a clean exit, None if it could not even be made."""

    id: str
    incarnation: int
    status: int | None
    reason: str  # for people: "signal SIGKILL", "exit status 70: <last line of its log>"


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent when `next_due_s` says so."""


Event = Boot | Start | Stop | Restart | StopAll | Spawned | BecameReady | BootChanged | Refused | Alive | Exited | Tick


# --- commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spawn:
    """Make the process; answer with `Spawned` or `Exited`."""

    spec: ChildSpec
    incarnation: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the process to stop (SIGTERM)."""

    id: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End its whole process group (SIGKILL)."""

    id: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Cast `message` to these children."""

    to: tuple[str, ...]
    message: Up | Down


@dataclass(frozen=True, slots=True)
class Answer:
    """End a call: done, or with an error."""

    call: int
    error: ErrorBody | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Log the death of a child."""

    id: str
    incarnation: int
    reason: str
    uptime_s: float  # since it was ready; 0 = never was
    deaths: int  # of this child that count, this one included
    limit: int
    outcome: str  # restarting, failed, stopped, gave_up
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AllReady:
    """Every child of the configuration is ready, or failed without being essential; said once."""


@dataclass(frozen=True, slots=True)
class Finished:
    """No process is left; leave with this status."""

    status: int
    reason: str
    error: ErrorBody | None = None  # of the child that ended everything


Command = Spawn | Terminate | Kill | Tell | Answer | Report | AllReady | Finished
