"""barreld, the root supervisor: starts every other process, watches them, restarts the one that died, and does nothing else.

Run as `python -P -m barrel_inference.supervisor.root [--config FILE] [--set KEY=VALUE ...]`, by systemd, `barrelctl start` or
`barrel_inference.Runtime`. Nobody restarts it but systemd. While it is down nothing runs: its children end with it.

Exit status: 0 after a stop; 1 when helpers died more often than `[supervisor]` allows; 78 when starting again will not help
(wrong configuration, an essential process that cannot start), so that a unit can say `RestartPreventExitStatus=78`.
"""

import asyncio
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from barrel_inference import codec, config, events
from barrel_inference.actor import Boot as BootDocument
from barrel_inference.config import Settings
from barrel_inference.errors import BarrelError, InternalError, InvalidArgument, NotSupported
from barrel_inference.log_file import open_log
from barrel_inference.protocol import (
    Beat,
    CannotStart,
    ChangeBoot,
    ChildSpec,
    ErrorBody,
    Hello,
    LoadProgress,
    Message,
    Ok,
    Ready,
    Reconfigured,
    Reload,
    Reloaded,
    RestartChild,
    StartChild,
    StopChild,
    StopTree,
    TreeRows,
    TreeStatus,
)
from barrel_inference.supervisor import arguments, reload, runtime_dir, spec, steps
from barrel_inference.supervisor.control import Control, Sender
from barrel_inference.supervisor.notify import Systemd, report_start
from barrel_inference.supervisor.restarts import Intensity
from barrel_inference.supervisor.spawn import Process, use_descriptors
from barrel_inference.supervisor.tree import EXIT_CANNOT_START, Limits, Tree
from barrel_inference.transport import ipc_endpoint

EXIT_BUG = 70  # sysexits(3) EX_SOFTWARE

# What a child said last may still be on its way through its socket when its exit is seen.
_LAST_WORD_S = 0.1

# At least one turn a second, so that the tree can tell its own long absence from that of others.
_LONGEST_TURN_S = 1.0

# systemd's own start limit (90 s) would end a runtime that loads a large model: until ready, ask for 30 s more every 10 s.
_KEEP_ALIVE_S = 10.0
_EXTEND_START_US = 30_000_000


@dataclass(frozen=True, slots=True)
class Options:
    """How this supervisor was started, besides its settings."""

    ready_fd: int | None = None
    alive_fd: int | None = None
    is_tied: bool = False
    read_again: Callable[[], Settings] | None = None  # the configuration as it is on disk now


class Supervisor:
    """Carries the tree's commands out, and tells it what happens."""

    def __init__(self, settings: Settings, specs: list[ChildSpec], options: Options) -> None:
        self._settings = settings
        self._specs = specs
        self._ready_fd = options.ready_fd
        self._alive_fd = options.alive_fd
        self._is_tied = options.is_tied
        self._read_again = options.read_again or (lambda: settings)
        self._dir = Path(settings.runtime.dir)
        self._log_dir = Path(settings.runtime.log_dir)
        self._settings_plain = config.dump(settings)
        # systemd's variables are for this process alone.
        self._environment = {k: v for k, v in os.environ.items() if k not in ("NOTIFY_SOCKET", "WATCHDOG_USEC")}
        self._systemd = Systemd(os.environ)
        self._processes: dict[str, Process] = {}
        self._events: deque[steps.Event] = deque()
        self._stop_calls: list[int] = []
        self._tick: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self._is_ready = False
        self.log = events.logger("supervisor", 0)

    async def run(self) -> int:
        """Live until told to stop, or until the tree gives up; the value is the exit status."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._crashed)
        self._finished: asyncio.Future[steps.Finished] = self._loop.create_future()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = Control(
            context, self._dir / "supervisor", self.log, self._on_message, lambda *child: self._tree.is_current(*child)
        )
        # Larger than any earlier supervisor's: a client tells a new router from an old one by its incarnation.
        first_incarnation = int(time.time() * 1000)
        self._tree = Tree(_limits(self._settings), first_incarnation=first_incarnation, now_s=time.monotonic())
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        self._loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        if self._is_tied:
            self._loop.add_reader(0, self._on_stdin)
        self.log.info("supervisor.started", pid=os.getpid(), runtime_dir=str(self._dir))
        self._keep_alive()
        self._do(steps.Boot(tuple(self._specs)))
        finished = await self._finished
        self._say_finished(finished)
        self._control.close()
        context.term()
        return finished.status

    # --- what happens

    def _do(self, event: steps.Event) -> None:
        """Let the tree decide, and carry out what it says; what that causes is handled after it."""
        self._events.append(event)
        while self._events:
            for command in self._tree.handle(self._events.popleft(), time.monotonic()):
                self._perform(command)
        if self._tick:
            self._tick.cancel()
        due_s = self._tree.next_due_s()
        wait_s = _LONGEST_TURN_S if due_s is None else max(0.0, min(_LONGEST_TURN_S, due_s - time.monotonic()))
        self._tick = self._loop.call_later(wait_s, self._on_tick)

    def _on_tick(self) -> None:
        # Without the socket's name nobody finds us, no child can be started, and nobody else can take our place.
        if not self._is_stopping and not (self._dir / "supervisor").exists():
            self.log.error("runtime_dir.removed", runtime_dir=str(self._dir))
            self._is_stopping = True
            self._do(steps.StopAll(failure=f"the runtime directory {str(self._dir)!r} was removed"))
        else:
            self._do(steps.Tick())

    def _on_signal(self, number: int) -> None:
        # A second Ctrl-C means: do not wait for saves. Other signals may come twice from a service manager.
        self._stop(at_once=number == signal.SIGINT and self._is_stopping)

    def _on_hangup(self) -> None:
        try:
            self._reload()
        except BarrelError as refused:
            self.log.error("config.refused", reason=str(refused))

    def _reload(self) -> Reloaded:
        """Read the configuration again and take up what can change; a wrong one changes nothing."""
        self._systemd.say("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            planned = reload.plan(self._settings, self._read_again())
            self._take_up(planned)
        finally:
            self._systemd.say("READY=1")
        self.log.info("config.reloaded", changed=planned.changed, pending=planned.pending)
        return Reloaded(changed=list(planned.changed), pending=list(planned.pending))

    def _reloaded(self) -> Reloaded | ErrorBody:
        try:
            return self._reload()
        except BarrelError as refused:
            return codec.error_body(refused)

    def _take_up(self, planned: reload.Plan) -> None:
        self._settings = planned.effective
        self._settings_plain = config.dump(planned.effective)
        events.set_level(planned.effective.log.level)
        self._control.tell(list(self._processes), Reconfigured(settings=self._settings_plain))
        # The poller keeps nothing: a new one is the simplest way to a new source and new thresholds.
        if "pressure" in self._processes and any(key.startswith("pressure.") for key in planned.changed):
            self._do(steps.Restart("pressure"))
        for name in planned.load:
            if f"model:{name}" not in self._processes:
                self._do(steps.Start(spec.model_child(name, planned.effective.models[name], planned.effective)))

    def _on_stdin(self) -> None:
        if not os.read(0, 4096):  # whoever we are tied to is gone
            self._loop.remove_reader(0)
            self._stop()

    def _stop(self, *, at_once: bool = False) -> None:
        self._is_stopping = True
        self._systemd.say("STOPPING=1")
        self._do(steps.StopAll(at_once))

    def _on_message(self, message: Message, sender: Sender | None, call: int | None) -> None:
        if call is not None:
            self._on_call(message, call)
        elif sender is not None:
            self._on_child(message, sender)
        else:
            self.log.warning("message.rejected", reason=f"{type(message).__name__} from no child of ours")

    def _on_child(self, message: Message, sender: Sender) -> None:
        name, incarnation = sender.id, sender.incarnation
        match message:
            case Ready(about=about):
                self._do(steps.BecameReady(name, incarnation, about))
            case Beat(call_age_ms=age_ms, call_budget_ms=budget_ms):
                self._do(steps.Alive(name, incarnation, age_ms, budget_ms))
            case CannotStart(error=error):
                self._do(steps.Refused(name, incarnation, error))
            case LoadProgress():
                for call in self._tree.start_calls(name, incarnation):
                    self._control.progress(call, message)
            case Hello():
                pass  # the socket remembers it
            case _:
                self.log.warning("message.rejected", reason=f"{type(message).__name__} from {name}")

    def _on_call(self, message: Message, call: int) -> None:
        match message:
            case StartChild(spec=child):
                self._do(steps.Start(child, call))
            case StopChild(id=child_id):
                self._do(steps.Stop(child_id, call))
            case RestartChild(id=child_id):
                self._do(steps.Restart(child_id, call))
            case ChangeBoot(id=child_id, incarnation=incarnation, boot=boot):
                self._do(steps.BootChanged(child_id, incarnation, boot, call))
            case Reload():
                self._control.answer(call, self._reloaded())
            case StopTree():
                self._stop_calls.append(call)
                self._stop()
            case TreeStatus():
                self._control.answer(
                    call, TreeRows(supervisor_pid=os.getpid(), children=self._tree.rows(time.monotonic()))
                )
            case _:
                error = NotSupported(f"the supervisor does not answer {type(message).__name__}")
                self._control.answer(call, codec.error_body(error))

    def _on_exit(self, child: ChildSpec, incarnation: int, status: int, reason: str) -> None:
        if self._tree.is_starting(child.id, incarnation):
            self._loop.call_later(_LAST_WORD_S, self._gone, child, incarnation, status, reason)
        else:
            self._gone(child, incarnation, status, reason)

    def _gone(self, child: ChildSpec, incarnation: int, status: int, reason: str) -> None:
        self._processes.pop(child.id, None)
        self._control.forget(child.id)
        runtime_dir.remove_child_files(self._dir, child.id)
        self._do(steps.Exited(child.id, incarnation, status, reason))

    # --- what is to be done

    def _perform(self, command: steps.Command) -> None:
        match command:
            case steps.Spawn(child, incarnation):
                self._spawn(child, incarnation)
            case steps.Terminate(child_id):
                if process := self._processes.get(child_id):
                    process.terminate()
            case steps.Kill(child_id):
                if process := self._processes.get(child_id):
                    process.kill()
            case steps.Tell(to, message):
                self._control.tell(to, message)
            case steps.Answer(call, error):
                self._control.answer(call, error or Ok())
            case steps.Report():
                self._report(command)
            case steps.AllReady():
                self.log.info("supervisor.ready")
                self._is_ready = True
                self._systemd.say("READY=1", self._status_line())
                report_start(self._ready_fd)
                self._ready_fd = None
            case steps.Finished():
                if not self._finished.done():
                    self._finished.set_result(command)

    def _spawn(self, child: ChildSpec, incarnation: int) -> None:
        boot = msgspec.json.encode(
            BootDocument(
                id=child.id, incarnation=incarnation, runtime_dir=str(self._dir),
                state_dir=self._settings.runtime.state_dir, parent_pid=os.getpid(), settings=self._settings_plain,
                boot=child.boot, log_level=self._settings.log.level,
            )
        )  # fmt: skip
        try:
            process = Process(
                child, boot + b"\n", self._log_dir / f"{child.id}.log", self._environment,
                lambda status, reason: self._on_exit(child, incarnation, status, reason), keep_fd=self._alive_fd,
            )  # fmt: skip
        except (OSError, InvalidArgument) as error:
            self._events.append(steps.Exited(child.id, incarnation, None, f"could not be started: {error}"))
            return
        self._processes[child.id] = process
        self.log.info("child.started", child=child.id, incarnation_of_child=incarnation, pid=process.pid)
        self._events.append(steps.Spawned(child.id, incarnation, process.pid))

    def _say_finished(self, finished: steps.Finished) -> None:
        if self._tick:
            self._tick.cancel()
        for call in self._stop_calls:
            self._control.answer(call, Ok())
        error = finished.error or codec.error_body(
            InternalError(f"the runtime was {finished.reason} before it was ready")
        )
        report_start(self._ready_fd, error)
        level = "error" if finished.status else "info"
        getattr(self.log, level)("supervisor.stopped", status=finished.status, reason=finished.reason)

    def _report(self, death: steps.Report) -> None:
        """The crash report: who, why, how long it had served, and how many such deaths are allowed."""
        # A restart that was asked for ends with status 0 as well.
        is_orderly = death.outcome == "stopped" or (death.outcome == "restarting" and death.reason == "exit status 0")
        write = self.log.info if is_orderly else self.log.error
        write(
            "child.exited", child=death.id, incarnation_of_child=death.incarnation, reason=death.reason,
            uptime_s=round(death.uptime_s, 3), deaths=death.deaths, limit=death.limit, outcome=death.outcome,
            delay_s=death.delay_s,
        )  # fmt: skip

    def _status_line(self) -> str:
        """What `systemctl status` shows."""
        rows = self._tree.rows(time.monotonic())
        ready = [row for row in rows if row.state == "ready"]
        models = sum(row.group == "model" for row in ready)
        return f"STATUS={len(ready)} of {len(rows)} processes serve, {models} of them models"

    def _keep_alive(self) -> None:
        """Tell systemd that the loop turns and, until everything is ready, that a long start is no failure."""
        more = [] if self._is_ready else [f"EXTEND_TIMEOUT_USEC={_EXTEND_START_US}"]
        self._systemd.say("WATCHDOG=1", *more, self._status_line())
        self._loop.call_later(self._systemd.watchdog_s or _KEEP_ALIVE_S, self._keep_alive)

    def _crashed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A bug here: leave at once, and the children end with us; whoever runs us starts a clean one."""
        self.log.critical("supervisor.crashed", error=context.get("message"), exc_info=context.get("exception"))
        os._exit(EXIT_BUG)


def _limits(settings: Settings) -> Limits:
    own = settings.supervisor
    return Limits(
        helpers=Intensity(own.intensity, own.period_s),
        models=Intensity(own.model_intensity, own.model_period_s),
        backoff_max_s=own.backoff_max_s,
        hang_s=own.hang_s,
    )


def _detach() -> None:
    """Go on as a process of nobody's; before any thread or socket exists."""
    if os.fork():
        os._exit(0)
    os.chdir("/")


def main(argv: list[str] | None = None) -> int:
    """Run a supervisor; the value is its exit status."""
    given = arguments.parse(sys.argv[1:] if argv is None else argv)
    try:
        use_descriptors()
        settings = arguments.settings_of(given)
        children = arguments.specs_of(given, settings)
        own_dir, state_dir = Path(settings.runtime.dir), Path(settings.runtime.state_dir)
        for child in children:  # the longest names there will be; a path that is too long must not look like a crash
            ipc_endpoint(own_dir / f"{child.id}.arena")
        if given.detach:
            _detach()
        claims = [runtime_dir.claim(own_dir, "runtime.dir"), runtime_dir.claim(state_dir, "runtime.state_dir")]
        log = open_log(Path(settings.runtime.log_dir) / "supervisor.log")
    except (BarrelError, OSError) as error:
        body = codec.error_body(error if isinstance(error, BarrelError) else InvalidArgument(str(error)))
        report_start(given.ready_fd, body)
        print(f"barreld: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    os.umask(0o077)  # sockets and files are this user's, whatever the modes of their directories
    style = events.style_for(settings.log.format, 2, os.environ)
    events.configure(level=settings.log.level, style=style, keep=log)
    runtime_dir.sweep(own_dir)
    sources = arguments.with_sources(given)
    options = Options(given.ready_fd, given.alive_fd, given.tied, lambda: arguments.settings_of(sources))
    status = asyncio.run(Supervisor(settings, children, options).run())
    runtime_dir.leave(own_dir)
    for path in given.remove_at_exit:
        shutil.rmtree(path, ignore_errors=True)
    for claimed in claims:
        os.close(claimed)
    return status


if __name__ == "__main__":
    sys.exit(main())
