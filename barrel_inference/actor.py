"""What every child process does: read its boot document, connect, say ready, serve, beat, drain, die with its parent.

A child's module builds an `Actor`, registers handlers by message type, and calls `run`. A handler gets the message and the
`Request` it came with. For a call it returns the reply (or raises a `BarrelError`), or it is a coroutine that does; a
handler of a stream returns None and answers through the request later.

Standard input is the child's tie to its parent: the boot document comes first, and end of file means that the supervisor is
gone, however it went. `PR_SET_PDEATHSIG` is the second string.
"""

import asyncio
import contextlib
import ctypes
import gc
import inspect
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from barrel_inference import codec, events, protocol
from barrel_inference.errors import (
    BarrelError,
    ModelDown,
    NotSupported,
    ProtocolError,
    TierUnavailable,
)
from barrel_inference.peers import Peer as Peer
from barrel_inference.peers import Request as Request
from barrel_inference.protocol import (
    Beat,
    CannotStart,
    Down,
    Header,
    Hello,
    Kind,
    Message,
    Ready,
    Reconfigured,
    Up,
)
from barrel_inference.transport import Frames, Socket, bind_router

BEAT_S = 2.0

EXIT_OK = 0
EXIT_BUG = 70  # sysexits(3) EX_SOFTWARE: an unexpected exception; the supervisor starts us again
EXIT_CANNOT_START = 78  # sysexits(3) EX_CONFIG: starting again will not help

# Who is there, who is not, and what the settings are comes by the supervisor's own connection, from nobody else.
_SUPERVISORS_VERBS = frozenset(protocol.VERB_OF[body] for body in (Up, Down, Reconfigured))

M = TypeVar("M", bound=Message)
T = TypeVar("T")


def settle(future: "asyncio.Future[T]", result: T) -> None:
    """Give a future its result, unless nobody waits for it any more."""
    if not future.done():
        future.set_result(result)


class Boot(msgspec.Struct, frozen=True):
    """The boot document: one JSON line on standard input."""

    id: str
    incarnation: int
    runtime_dir: str
    state_dir: str
    parent_pid: int
    settings: dict[str, Any]  # the whole configuration, as `config.dump` wrote it
    boot: dict[str, Any]  # this child's own part of its specification
    log_level: str = "info"


Handler = Callable[[Any, Request], Any]


class Actor:
    """One child process. Build it, register handlers with `on`, and pass it to `run`."""

    def __init__(self, boot: Boot) -> None:
        self.boot = boot
        self.id = boot.id
        self.incarnation = boot.incarnation
        self.runtime_dir = Path(boot.runtime_dir)
        self.state_dir = Path(boot.state_dir)
        self.log = events.logger(boot.id, boot.incarnation)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.peers: dict[str, Peer] = {}
        self.rejected_count = 0
        self.loop: asyncio.AbstractEventLoop
        self.server: Socket
        self.supervisor: Peer
        self._handlers: dict[type[Message], Handler] = {}
        self._on_up: list[Callable[[Peer], None]] = []
        self._on_down: list[Callable[[Down], None]] = []
        self._on_reconfigured: list[Callable[[], None]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping: asyncio.Event
        self._turned_s = time.monotonic()
        self.routed_handler: Callable[[Frames], None] | None = None  # the router's: takes clients' frames unopened
        self.call_age: Callable[[], tuple[int, int]] = lambda: (0, 0)  # the model's: (age ms, budget ms)
        self.on(Up, self._peer_up)
        self.on(Down, self._peer_down)
        self.on(Reconfigured, self._reconfigured)

    # --- what a process registers

    def on(self, message_type: type[M], handler: Callable[[M, Request], Any]) -> None:
        """Handle every message of this type."""
        self._handlers[message_type] = handler

    def on_up(self, callback: Callable[[Peer], None]) -> None:
        """Call back for each peer that serves from now on."""
        self._on_up.append(callback)

    def on_down(self, callback: Callable[[Down], None]) -> None:
        """Call back for each incarnation that died."""
        self._on_down.append(callback)

    def on_reconfigured(self, callback: Callable[[], None]) -> None:
        """Call back when the settings have changed; `boot.settings` holds the new ones then."""
        self._on_reconfigured.append(callback)

    # --- what a process uses

    def peer(self, peer_id: str) -> Peer:
        """The connection to a process that is up; raises the down error of its kind when it is not."""
        found = self.peers.get(peer_id)
        if found is None:
            cls = TierUnavailable if peer_id.startswith("tier:") else ModelDown
            raise cls(f"{peer_id} is not running", process=peer_id)
        return found

    def cast(self, peer_id: str, message: Message) -> bool:
        """Cast to a peer if it is up."""
        found = self.peers.get(peer_id)
        return found is not None and found.cast(message)

    def count(self, **deltas: int) -> None:
        """Add to the runtime's counters."""
        self.cast("index", protocol.Counted(deltas=deltas))

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a coroutine beside the loop; an exception that escapes it ends the process."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def every(self, interval_s: float, function: Callable[[], Any]) -> None:
        """Call `function` again and again until the process stops."""

        def turn() -> None:
            function()
            if not self._stopping.is_set():
                self.loop.call_later(interval_s, turn)

        self.loop.call_later(interval_s, turn)

    def stop(self) -> None:
        """Leave the serving state, as SIGTERM does."""
        self._stopping.set()

    def cannot_start(self, error: BarrelError) -> None:
        """Tell the supervisor that starting again will not help, and exit."""
        self.supervisor.cast(CannotStart(incarnation=self.incarnation, error=codec.error_body(error)))
        self.context.destroy(linger=1000)  # every socket: `term` alone would wait for the open ones for ever
        os._exit(EXIT_CANNOT_START)

    def rejected(self, reason: str) -> None:
        """Count a message that we do not accept."""
        self.rejected_count += 1
        self.log.warning("message.rejected", reason=reason[:300])
        self.count(messages_rejected=1)

    # --- incoming

    def dispatch(self, request: Request, header: Header, body: bytes) -> None:
        """Decode and handle one message; protocol errors are answered, never fatal."""
        try:
            message = codec.decode_request(header, body)
            handler = self._handlers.get(type(message))
            if handler is None:
                raise NotSupported(f"{self.id} does not answer {header.verb!r}")
        except BarrelError as bad:
            self.rejected(f"{bad}")
            request.error(bad)
            return
        try:
            result = handler(message, request)
        except BarrelError as refused:
            request.error(refused)
            return
        if inspect.iscoroutine(result):
            self.spawn(self._answer(result, request))
        elif result is not None:
            request.done(result)

    async def _answer(self, result: Awaitable[Message | None], request: Request) -> None:
        try:
            reply = await result
        except BarrelError as refused:
            request.error(refused)
            return
        if reply is not None:
            request.done(reply)

    def _on_server_frames(self, frames: Frames) -> None:
        if self.routed_handler:
            self.routed_handler(frames)
            return
        try:
            peer, route, raw_header, body = frames
            header = codec.decode_header(raw_header)
        except (ValueError, ProtocolError) as bad:
            self.rejected(f"{bad}")
            return
        if header.kind not in (Kind.CALL, Kind.CAST) or header.verb in _SUPERVISORS_VERBS:
            self.rejected(f"unexpected {header.kind} {header.verb[:40]!r}")
            return
        self.dispatch(Request(self, peer, route, header), header, body)

    def _peer_up(self, up: Up, _request: Request) -> None:
        if (old := self.peers.pop(up.id, None)) is not None:
            old.close("replaced")
        peer = self.peers[up.id] = Peer(self, up.id, up)
        for callback in self._on_up:
            callback(peer)

    def _peer_down(self, down: Down, _request: Request) -> None:
        peer = self.peers.get(down.id)
        if peer is not None and peer.incarnation == down.incarnation:
            del self.peers[down.id]
            peer.close(down.reason)
        for callback in self._on_down:
            callback(down)

    def _reconfigured(self, message: Reconfigured, _request: Request) -> None:
        # In place: whoever holds the mapping sees the new values.
        self.boot.settings.clear()
        self.boot.settings.update(message.settings)
        events.set_level(message.settings["log"]["level"])
        for callback in self._on_reconfigured:
            callback()

    # --- life

    async def _live(self, serve: Callable[["Actor"], Awaitable[dict[str, Any] | None]],
                    drain: Callable[["Actor"], Awaitable[None]] | None) -> None:  # fmt: skip
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(self._loop_failed)
        self._stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self._stopping.set)
        self.supervisor = Peer(self, "supervisor", None)
        self.supervisor.cast(Hello(id=self.id, incarnation=self.incarnation, pid=os.getpid()))
        self.server = bind_router(self.context, self.runtime_dir / self.id, self._on_server_frames)
        try:
            about = await serve(self)
        except BarrelError as error:
            self.log.error("child.cannot_start", code=error.code, reason=str(error))
            self.cannot_start(error)
        # What was imported is never garbage, and a look through all of it holds everybody up for 5 to 10 ms now and then.
        gc.freeze()
        self.supervisor.cast(Ready(incarnation=self.incarnation, about=about or {}))
        self.log.info("child.ready")
        self._beat()
        await self._stopping.wait()
        self.log.info("child.stopping")
        if drain:
            await drain(self)
        for peer in list(self.peers.values()):
            peer.close("stopping")
        self.server.close(linger_ms=200)
        self.supervisor.socket.close(linger_ms=200)
        with contextlib.suppress(FileNotFoundError):
            (self.runtime_dir / self.id).unlink()

    def _beat(self) -> None:
        now_s = time.monotonic()
        call_age_ms, call_budget_ms = self.call_age()
        self.supervisor.cast(
            Beat(
                incarnation=self.incarnation,
                loop_age_ms=max(0, int((now_s - self._turned_s - BEAT_S) * 1000)),
                call_age_ms=call_age_ms,
                call_budget_ms=call_budget_ms,
            )
        )
        self._turned_s = now_s
        if not self._stopping.is_set():
            self.loop.call_later(BEAT_S, self._beat)

    def _task_done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crash(error)

    def _loop_failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.crash(context.get("exception") or RuntimeError(context.get("message", "unknown")))

    def crash(self, error: BaseException) -> None:
        """Write a crash report and exit: a bug leaves a state that nobody can vouch for."""
        text = "".join(traceback.format_exception(error))
        self.log.critical("child.crashed", error=type(error).__name__, traceback=text)
        os._exit(EXIT_BUG)


def read_boot() -> Boot:
    """The boot document; blocks until the supervisor has written it."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65536)
        if not chunk:
            sys.exit(EXIT_OK)  # the parent went away before it told us anything
        line += chunk
    return msgspec.json.decode(line, type=Boot)


def die_with_parent(parent_pid: int) -> None:
    """Leave at once when the supervisor is gone, however it went.

    os._exit: with no supervisor left, a slow clean-up is only a longer-lived orphan.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(EXIT_OK)

    def wait_for_eof() -> None:
        while os.read(0, 4096):
            pass
        os._exit(EXIT_OK)

    threading.Thread(target=wait_for_eof, name="parent-watch", daemon=True).start()


def run(
    make: Callable[[Actor], Callable[[Actor], Awaitable[dict[str, Any] | None]]],
    *,
    drain: Callable[[Actor], Awaitable[None]] | None = None,
) -> int:
    """The life of a child: the value is its exit status.

    `make` registers handlers on the actor and returns the coroutine function that brings it to readiness; what that returns
    is told to all peers. `drain` runs on SIGTERM, before the sockets close.
    """
    boot = read_boot()
    die_with_parent(boot.parent_pid)
    events.configure(level=boot.log_level)
    actor = Actor(boot)
    try:
        asyncio.run(actor._live(make(actor), drain))
    except Exception as bug:  # the process's top loop: report, then let the supervisor decide
        actor.crash(bug)
    actor.log.info("child.stopped")
    return EXIT_OK
