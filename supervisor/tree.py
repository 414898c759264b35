"""One-for-one supervision: events in, commands out. Pure.

`Tree.handle(event, now_s)` takes what happened and returns what to do; `now_s` is monotonic. A child is in one of these states:

    starting ──ready──> ready ──death──> backoff ──due──> starting
        └─death before it ever served, or CannotStart──> failed       (stays listed until stopped or started anew)
    any with a process ──stop, restart, hang──> stopping ──death──> forgotten, starting, or judged like any other death

Restart intensity has two levels. A helper's death counts against the whole tree, which gives up over the limit; a model's
counts against that model, which alone becomes failed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from barrel_inference import codec
from barrel_inference.errors import (
    AlreadyLoaded,
    BadModel,
    BarrelError,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    ModelDown,
    ModelFailed,
    NotFound,
)
from barrel_inference.protocol import ChildRow, ChildSpec, Down, ErrorBody, Up
from barrel_inference.supervisor import spec as specs
from barrel_inference.supervisor.restarts import Intensity, RestartWindow, delay_s
from barrel_inference.supervisor.steps import (
    Alive,
    AllReady,
    Answer,
    BecameReady,
    Boot,
    BootChanged,
    Command,
    Event,
    Exited,
    Finished,
    Kill,
    Refused,
    Report,
    Restart,
    Spawn,
    Spawned,
    Start,
    Stop,
    StopAll,
    Tell,
    Terminate,
    Tick,
)

EXIT_OK = 0
EXIT_GAVE_UP = 1  # too many restarts: whoever runs us may try again
EXIT_CANNOT_START = 78  # sysexits(3) EX_CONFIG: of a child and of the runtime alike, starting again will not help

# A model was told to stop its call when the budget ended; this much later it is taken for hung.
CALL_GRACE_S = 10.0
# A model's I/O thread shares its interpreter with the engine thread, and its memory may be paged out.
MODEL_PATIENCE = 3
# Without a turn of our own for so long (suspended, stopped by a debugger) the beats wait unread: nobody else is to blame.
LATE_TURN_S = 3.0

State = Literal["starting", "ready", "stopping", "backoff", "failed"]
Then = Literal["forget", "restart", "judge"]


# --- state ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers of `[supervisor]`."""

    helpers: Intensity
    models: Intensity
    backoff_max_s: float
    hang_s: float


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    window: RestartWindow
    state: State = "starting"
    incarnation: int = 0
    pid: int | None = None
    served_before_s: float = 0.0  # ready time of earlier incarnations
    ready_s: float | None = None  # when this incarnation became ready; peers know it exactly while this is set
    ever_ready: bool = False
    due_s: float | None = None  # starting: too late then; backoff: start then; stopping: SIGKILL then
    beat_s: float = 0.0
    then: Then = "judge"  # stopping: what follows
    restarts: int = 0
    reason: str | None = None
    error: ErrorBody | None = None
    about: dict[str, Any] = field(default_factory=dict)
    start_calls: list[int] = field(default_factory=list)
    stop_calls: list[int] = field(default_factory=list)

    @property
    def has_process(self) -> bool:
        return self.state in ("starting", "ready", "stopping")

    def served_s(self, now_s: float) -> float:
        return self.served_before_s + (now_s - self.ready_s if self.ready_s is not None else 0.0)

    def up(self) -> Up:
        assert self.pid is not None
        return Up(id=self.spec.id, incarnation=self.incarnation, pid=self.pid, group=self.spec.group, about=self.about)


class Tree:
    """The children, and what is to be done about them."""

    def __init__(self, limits: Limits, *, first_incarnation: int, now_s: float) -> None:
        self._limits = limits
        self._incarnation = first_incarnation
        self._children: dict[str, _Child] = {}  # in start order
        self._turn_s = now_s
        self._said_ready: bool | None = None  # None: not booted yet
        self._finish: Finished | None = None  # set: everything is being stopped, and this comes last

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """What to do about `event`, in order."""
        if (absence_s := now_s - self._turn_s) > LATE_TURN_S:
            for child in self._children.values():
                child.beat_s = now_s
                if child.due_s is not None:
                    child.due_s += absence_s
        self._turn_s = now_s
        commands = list(self._react(event, now_s))
        if self._finish is not None:
            commands += self._go_on_stopping(now_s)
        elif self._said_ready is False and all(c.state in ("ready", "failed") for c in self._children.values()):
            self._said_ready = True
            commands.append(AllReady())
        return commands

    def next_due_s(self) -> float | None:
        """When a `Tick` is wanted next; None: not before another event."""
        dues = [due_s for child in self._children.values() if (due_s := self._due_s(child)) is not None]
        return min(dues, default=None)

    def rows(self, now_s: float) -> list[ChildRow]:
        """The children as observers see them, in start order."""
        return [
            ChildRow(
                id=child.spec.id, group=child.spec.group, state=child.state, incarnation=child.incarnation,
                pid=child.pid, restarts=child.restarts,
                uptime_s=now_s - child.ready_s if child.ready_s is not None else 0.0,
                reason=child.reason, error=child.error,
            )
            for child in self._children.values()
        ]  # fmt: skip

    def start_calls(self, child_id: str, incarnation: int) -> tuple[int, ...]:
        """The calls that wait for this incarnation to become ready."""
        child = self._current(child_id, incarnation)
        return tuple(child.start_calls) if child else ()

    def is_current(self, child_id: str, incarnation: int) -> bool:
        """Is this the incarnation that lives?"""
        return self._current(child_id, incarnation) is not None

    def is_starting(self, child_id: str, incarnation: int) -> bool:
        """Whether this incarnation lives and has not said anything final yet."""
        child = self._current(child_id, incarnation)
        return child is not None and child.state == "starting" and child.error is None

    def check(self) -> None:
        """Assert what always holds."""
        for child_id, child in self._children.items():
            assert child_id == child.spec.id
            assert child.incarnation <= self._incarnation
            assert child.pid is None or child.has_process, "only a live child has a pid"
            assert child.ready_s is None or child.has_process, "peers are told when a child dies"
            assert child.state != "ready" or (child.ready_s is not None and child.ever_ready)
            assert child.state not in ("backoff", "stopping") or child.due_s is not None
            assert child.state != "failed" or child.error is not None, "a failed child has a reason"
            assert not child.start_calls or child.state != "failed", "who waited was told"
            assert not child.stop_calls or child.state == "stopping"
        incarnations = [child.incarnation for child in self._children.values()]
        assert len(set(incarnations)) == len(incarnations)
        assert self._finish is None or all(child.has_process for child in self._children.values())

    # --- events

    def _react(self, event: Event, now_s: float) -> Iterator[Command]:
        match event:
            case Boot(children):
                self._said_ready = False
                for spec in children:
                    yield from self._start(spec, None, now_s)
            case Start(spec, call):
                yield from self._start(spec, call, now_s)
            case Stop(child_id, call):
                yield from self._stop(child_id, call, now_s)
            case Restart(child_id, call):
                yield from self._restart(child_id, call, now_s)
            case StopAll(at_once, failure):
                yield from self._stop_all(Finished(EXIT_GAVE_UP, failure) if failure else Finished(EXIT_OK, "stopped"))
                if at_once:
                    yield from (Kill(child.spec.id) for child in self._children.values())
            case BootChanged(child_id, incarnation, boot, call):
                if child_or_none := self._current(child_id, incarnation):
                    child_or_none.spec = msgspec.structs.replace(child_or_none.spec, boot=boot)
                yield from _answer([call], None)
            case Tick():
                for child in list(self._children.values()):
                    yield from self._tick(child, now_s)
            case Spawned() | BecameReady() | Refused() | Alive() | Exited():
                # A message of an incarnation that is not the present one is of a dead process.
                if child_or_none := self._current(event.id, event.incarnation):
                    yield from self._heard(child_or_none, event, now_s)

    def _heard(
        self, child: _Child, event: Spawned | BecameReady | Refused | Alive | Exited, now_s: float
    ) -> Iterator[Command]:
        match event:
            case Spawned(_, _, pid):
                child.pid = pid
            case BecameReady(_, _, about):
                if child.state == "starting":
                    yield from self._ready(child, about, now_s)
            case Refused(_, _, error):
                child.error = error
            case Alive(_, _, call_age_ms, call_budget_ms):
                child.beat_s = now_s
                over_ms = call_age_ms - call_budget_ms
                if child.state == "ready" and call_budget_ms and over_ms > CALL_GRACE_S * 1000:
                    reason = f"hung: one call took {call_age_ms} ms, {call_budget_ms} ms were allowed"
                    yield from self._replace(child, reason, now_s)
            case Exited(_, _, status, reason):
                yield from self._exited(child, status, reason, now_s)

    def _start(self, spec: ChildSpec, call: int | None, now_s: float) -> Iterator[Command]:
        problems = specs.problems(spec)
        old = self._children.get(spec.id)
        if self._finish is not None:
            yield from _answer([call], ModelDown("the runtime is stopping"))
        elif problems:
            yield from _answer([call], InvalidArgument(f"child {spec.id!r}: {'; '.join(problems)}"))
        elif old is not None and old.state != "failed":
            yield from _answer([call], AlreadyLoaded(f"{spec.id} is already there ({old.state})"))
        else:
            self._children.pop(spec.id, None)  # a new one is stopped before those that were there
            limit = self._limits.models if spec.group == "model" else self._limits.helpers
            child = self._children[spec.id] = _Child(spec, RestartWindow(limit.period_s))
            child.start_calls = [] if call is None else [call]
            yield self._spawn(child, now_s)

    def _stop(self, child_id: str, call: int | None, now_s: float) -> Iterator[Command]:
        child = self._children.get(child_id)
        if child is None:
            yield from _answer([call], NotFound(f"there is no process {child_id!r}"))
            return
        stopped = ModelDown(f"{child_id} was stopped before it was ready")
        yield from _answer(child.start_calls, stopped)
        child.start_calls = []
        if child.has_process:
            if call is not None:
                child.stop_calls.append(call)
            yield from self._terminate(child, "forget", now_s)
            return
        del self._children[child_id]
        if child.state == "backoff":  # peers were promised another one
            yield self._down(child, "stopped", restarting=False)
        yield from _answer([call], None)

    def _restart(self, child_id: str, call: int | None, now_s: float) -> Iterator[Command]:
        child = self._children.get(child_id)
        if child is None or self._finish is not None or (child.state == "stopping" and child.then == "forget"):
            yield from _answer([call], NotFound(f"there is no process {child_id!r} that could be restarted"))
            return
        if call is not None:
            child.start_calls.append(call)
        if child.has_process:
            yield from self._terminate(child, "restart", now_s)
        else:
            yield self._spawn(child, now_s)

    def _stop_all(self, finish: Finished) -> Iterator[Command]:
        """Begin the end; `_go_on_stopping` does the rest, wave by wave."""
        if self._finish is not None:
            return
        self._finish = finish
        for child in list(self._children.values()):
            yield from _answer(child.start_calls, ModelDown("the runtime is stopping"))
            child.start_calls = []
            if not child.has_process:
                del self._children[child.spec.id]

    def _go_on_stopping(self, now_s: float) -> Iterator[Command]:
        """Reverse order, but neighbours that run the same module need nothing of each other: they stop together."""
        assert self._finish is not None
        children = list(reversed(self._children.values()))
        if not children:
            yield self._finish
            return
        for child in children:
            if child.spec.module != children[0].spec.module:
                return
            yield from self._terminate(child, "forget", now_s)

    def _ready(self, child: _Child, about: dict[str, Any], now_s: float) -> Iterator[Command]:
        child.state, child.ready_s, child.beat_s, child.due_s = "ready", now_s, now_s, None
        child.about, child.ever_ready = about, True
        others = self._known_others(child)
        for other in others:
            yield Tell((child.spec.id,), other.up())
        if others:
            yield Tell(tuple(other.spec.id for other in others), child.up())
        yield from _answer(child.start_calls, None)
        child.start_calls = []

    def _tick(self, child: _Child, now_s: float) -> Iterator[Command]:
        due_s = self._due_s(child)
        if due_s is None or now_s < due_s:
            return
        if child.state == "backoff":
            yield self._spawn(child, now_s)
        elif child.state == "stopping":
            child.due_s = float("inf")
            yield Kill(child.spec.id)
        elif child.state == "starting":
            child.error = codec.error_body(
                DeadlineExceeded(f"{child.spec.id} was not ready within {child.spec.ready_ms} ms")
            )
            yield from self._replace(child, child.error.message, now_s)
        else:
            yield from self._replace(child, f"hung: no sign of life for {now_s - child.beat_s:.1f} s", now_s)

    # --- a death

    def _exited(self, child: _Child, status: int | None, reason: str, now_s: float) -> Iterator[Command]:
        if child.state != "stopping" or child.then != "judge":
            child.reason = reason  # else: we killed it, and the reason is ours
        uptime_s = now_s - child.ready_s if child.ready_s is not None else 0.0
        served_s = child.served_before_s = child.served_s(now_s)
        was_known, child.ready_s, child.pid = child.ready_s is not None, None, None
        outcome, wait_s = self._judge(child, status, served_s)
        told = str(child.reason)
        if was_known:
            yield self._down(child, told, restarting=outcome == "restarting")
        yield Report(
            child.spec.id, child.incarnation, told, uptime_s, child.window.count(served_s),
            self._limits.models.max_restarts if child.spec.group == "model" else self._limits.helpers.max_restarts,
            outcome, wait_s,
        )  # fmt: skip
        yield from self._follow(child, outcome, wait_s, now_s)

    def _judge(self, child: _Child, status: int | None, served_s: float) -> tuple[str, float]:
        """What becomes of a child that just died, and after what delay."""
        name, restart = child.spec.id, child.spec.restart
        if self._finish is not None:
            return "stopped", 0.0
        if child.state == "stopping" and child.then != "judge":
            return ("stopped" if child.then == "forget" else "restarting"), 0.0
        if status == EXIT_CANNOT_START and child.error is None:
            child.error = codec.error_body(InternalError(f"{name} cannot start: {child.reason}"))
        if child.error is not None and (status == EXIT_CANNOT_START or not child.ever_ready):
            child.reason = child.error.message
            return "failed", 0.0
        child.error = None  # not ready in time, but it was before: one more death
        if not child.ever_ready:
            cls = BadModel if child.spec.group == "model" else InternalError
            child.error = codec.error_body(cls(f"{name} ended before it was ready: {child.reason}"))
            return "failed", 0.0
        if restart == "temporary" or (restart == "transient" and status == 0):
            return "stopped", 0.0
        child.window.note(served_s)
        if self._is_over_limit(child, served_s):
            return self._over_limit(child), 0.0
        return "restarting", delay_s(child.window.count(served_s), self._limits.backoff_max_s)

    def _is_over_limit(self, child: _Child, served_s: float) -> bool:
        if child.spec.group == "model":
            return child.window.count(served_s) > self._limits.models.max_restarts
        helpers = [c for c in self._children.values() if c.spec.group != "model"]
        deaths = sum(c.window.count(c.served_s(self._turn_s)) for c in helpers)
        return deaths > self._limits.helpers.max_restarts

    def _over_limit(self, child: _Child) -> str:
        is_model = child.spec.group == "model"
        limit = self._limits.models if is_model else self._limits.helpers
        who = child.spec.id if is_model else f"{child.spec.id} and other processes"
        text = (
            f"{who} died more than {limit.max_restarts} times in {limit.period_s:g} s of service, last: {child.reason}"
        )
        if is_model:
            child.error = codec.error_body(ModelFailed(text, hint="see its log, then load it anew"))
            return "failed"
        child.error = codec.error_body(InternalError(text))
        return "gave_up"

    def _follow(self, child: _Child, outcome: str, wait_s: float, now_s: float) -> Iterator[Command]:
        stop_calls, child.stop_calls = child.stop_calls, []
        if outcome == "restarting" and child.state == "stopping" and child.then == "restart":
            yield self._spawn(child, now_s)
        elif outcome == "restarting":
            child.state, child.due_s = "backoff", now_s + wait_s
            child.restarts += 1
        elif outcome == "stopped":
            del self._children[child.spec.id]
            yield from _answer(child.start_calls, ModelDown(f"{child.spec.id} ended: {child.reason}"))
        else:
            assert child.error is not None
            child.state, child.due_s = "failed", None
            start_calls, child.start_calls = child.start_calls, []
            yield from (Answer(call, child.error) for call in start_calls)
            if outcome == "gave_up":
                yield from self._stop_all(Finished(EXIT_GAVE_UP, child.error.message, child.error))
            elif child.spec.essential:
                yield from self._stop_all(Finished(EXIT_CANNOT_START, child.error.message, child.error))
        yield from _answer(stop_calls, None)

    # --- steps

    def _spawn(self, child: _Child, now_s: float) -> Spawn:
        self._incarnation += 1
        if child.state == "failed":  # started anew on request: the past is forgotten
            child.window, child.ever_ready = RestartWindow(child.window.period_s), False
        child.state, child.incarnation, child.error, child.then = "starting", self._incarnation, None, "judge"
        child.due_s = now_s + child.spec.ready_ms / 1000 if child.spec.ready_ms else None
        return Spawn(child.spec, child.incarnation)

    def _terminate(self, child: _Child, then: Then, now_s: float) -> Iterator[Command]:
        if child.state != "stopping":
            yield Terminate(child.spec.id)
            child.due_s = now_s + child.spec.shutdown_ms / 1000
        child.state, child.then = "stopping", then

    def _replace(self, child: _Child, reason: str, now_s: float) -> Iterator[Command]:
        """Kill what will not listen; its death is judged like any other."""
        child.state, child.then, child.reason = "stopping", "judge", reason
        child.due_s = float("inf")
        yield Kill(child.spec.id)

    def _due_s(self, child: _Child) -> float | None:
        if child.state == "ready":
            patience = MODEL_PATIENCE if child.spec.group == "model" else 1
            return child.beat_s + self._limits.hang_s * patience
        return child.due_s

    def _current(self, child_id: str, incarnation: int) -> _Child | None:
        child = self._children.get(child_id)
        return child if child is not None and child.incarnation == incarnation and child.has_process else None

    def _known_others(self, child: _Child) -> list[_Child]:
        return [c for c in self._children.values() if c is not child and c.ready_s is not None]

    def _down(self, child: _Child, reason: str, *, restarting: bool) -> Tell:
        to = tuple(other.spec.id for other in self._known_others(child))
        return Tell(to, Down(id=child.spec.id, incarnation=child.incarnation, reason=reason, restarting=restarting))


def _answer(calls: list[int] | list[int | None], error: BarrelError | None) -> Iterator[Answer]:
    body = codec.error_body(error) if error is not None else None
    return (Answer(call, body) for call in calls if call is not None)
