"""A client's way to the runtime: connects when needed, calls again when that is harmless, waits for what is being restarted."""

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import Awaitable, Iterator
from typing import TypeVar

import zmq

from barrel_inference import codec, protocol
from barrel_inference.connection import Call, Connection, OnEvent, has_supervisor, is_anothers, is_forbidden
from barrel_inference.errors import BarrelError, DeadlineExceeded, InvalidArgument, ModelDown, ModelFailed, NoRuntime
from barrel_inference.protocol import Cancel, Message, ModelRow, Phase
from barrel_inference.resubmission import ConnectionLost, Tally, after
from barrel_inference.transport import default_runtime_dir

R = TypeVar("R", bound=Message)
T = TypeVar("T")

# A router is back in a tenth of a second, and after several deaths in backoff_max_s (5 s).
ROUTER_PATIENCE_S = 15.0

# From another machine nobody sees whether a supervisor is there. Who has not had an answer yet waits for one restart.
STRANGER_PATIENCE_S = 2.0

# How long a request waits for its model to be loaded again when it has no deadline of its own.
MODEL_PATIENCE_S = 600.0

# Where the system unit's runtime is to be found.
_SERVICE_SOCKET = "/run/barrel-inference/router"

_FORBIDDEN_HINT = "join the group that its runtime.socket_group names, and log in again"

_ANOTHERS_HINT = "set XDG_RUNTIME_DIR to a directory of your own"

_REFUSED_HINT = "have it added (`barrelctl keys add`), and taken up (`barrelctl reload`)"

_POLL_S = (0.02, 0.05, 0.1, 0.25)

GREET_DEADLINE_S = 5.0


def endpoint_of(given: str | None) -> str:
    """The router's endpoint: what was given, else `$BARREL_ENDPOINT`, else the default socket of this user."""
    found = given or os.environ.get("BARREL_ENDPOINT") or str(default_runtime_dir() / "router")
    if not isinstance(found, str) or not found.strip():
        raise InvalidArgument(
            f"endpoint = {found!r} is no endpoint", hint="for example ipc:///run/user/1000/barrel-inference/router"
        )
    return found if "://" in found else f"ipc://{os.path.abspath(found)}"


class Deadline:
    """An instant after which nobody waits any more; None = never."""

    def __init__(self, seconds: float | None) -> None:
        self.given_s = seconds
        self._at_s = None if seconds is None else time.monotonic() + seconds

    @property
    def left_s(self) -> float | None:
        """Seconds left, 0 when it has passed; None = without end."""
        return None if self._at_s is None else max(0.0, self._at_s - time.monotonic())

    @property
    def left_ms(self) -> int:
        """As it travels in a header: 0 = without end."""
        left_s = self.left_s
        return 0 if left_s is None else max(1, int(left_s * 1000))

    def check(self, what: str) -> None:
        """Raise `DeadlineExceeded` if it has passed."""
        if self.left_s == 0.0:
            raise DeadlineExceeded(f"{what} did not end within {self.given_s:g} s")


class Link:
    """Owned by one `AsyncClient`; used on its loop only."""

    def __init__(self, endpoint: str, *, timeout_s: float | None, retry: bool) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self.retry = retry
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False
        self._has_met = False  # the runtime has answered here before

    async def connection(self) -> Connection:
        """A connection that stands, as far as anybody knows.

        Raises:
            NoRuntime: nobody answers, and no supervisor is there that would restart who should; over TCP, nobody answered
                for a while.
        """
        if self._connection is not None and not self._connection.is_lost:
            return self._connection
        async with self._connecting:
            if self._connection is None or self._connection.is_lost:
                self._connection = await self._connect()
            return self._connection

    async def _connect(self) -> Connection:
        if self._is_closed:
            raise NoRuntime("the client is closed", hint="make a new Client")
        if is_anothers(self.endpoint):
            raise NoRuntime(f"{self.endpoint} was made by another user", hint=_ANOTHERS_HINT)
        patience = Deadline(self._patience_s())
        for pause_s in _pauses():
            if self._context is None:
                self._context = zmq.Context()
            connection = Connection(self._context, self.endpoint)
            try:
                if await connection.linked():
                    await self._greet(connection)
                    self._has_met = True
                    return connection
            except ConnectionLost:
                pass  # it broke again at once; the next turn finds out what is there
            except BaseException:
                connection.lose()
                raise
            connection.lose()
            if is_forbidden(self.endpoint):
                raise NoRuntime(f"the runtime at {self.endpoint} is closed to this user", hint=_FORBIDDEN_HINT)
            if connection.is_refused:
                raise NoRuntime(f"the runtime at {self.endpoint} does not know this client's key", hint=_REFUSED_HINT)
            if patience.left_s == 0.0 or has_supervisor(self.endpoint) is False:
                break
            await asyncio.sleep(pause_s)
        is_remote = self.endpoint.startswith("tcp://")
        hint = "check the address, and server.key" if is_remote else "start one with `barrelctl start`"
        if not is_remote and os.access(_SERVICE_SOCKET, os.W_OK):
            hint += f", or set BARREL_ENDPOINT=ipc://{_SERVICE_SOCKET} for the service"
        raise NoRuntime(f"no runtime answers at {self.endpoint}", hint=hint)

    def _patience_s(self) -> float:
        """How long a router that does not answer is waited for."""
        if not self.retry:
            return 0.0
        is_known = self._has_met or has_supervisor(self.endpoint) is not None
        return ROUTER_PATIENCE_S if is_known else STRANGER_PATIENCE_S

    async def _greet(self, connection: Connection) -> None:
        """The first call: a runtime of another version says so here."""
        call = connection.start("router", protocol.Greet(), request_id=new_id())
        try:
            await asyncio.wait_for(call.future, GREET_DEADLINE_S)
        except TimeoutError:
            raise ConnectionLost from None
        finally:
            connection.forget(call)

    async def call(
        self, target: str, message: Message, reply: type[R], *, deadline_s: float | None = None, credit: int = 0,
        on_event: OnEvent | None = None, again: bool = True,
    ) -> R:  # fmt: skip
        """Make a call that may be made twice; after a death it is, when the process is back.

        Args:
            again: False: it must not be made twice, `ConnectionLost` and `ModelDown` are the caller's business.
        """
        deadline = Deadline(self.timeout_s if deadline_s is None else deadline_s)
        tally = Tally()
        while True:
            try:
                connection = await within(self.connection(), deadline, f"connecting to {self.endpoint}")
                call = connection.start(
                    target, message, request_id=new_id(), deadline_ms=deadline.left_ms, credit=credit, on_event=on_event
                )
                return codec.decode(await answer(connection, call, deadline, protocol.VERB_OF[type(message)]), reply)
            except (ConnectionLost, ModelDown) as failure:
                if not again:
                    raise
                tally = after(failure, tally, retry=self.retry)
                if isinstance(failure, ModelDown):
                    await self.wait_until_back(target, deadline)

    async def wait_until_back(self, target: str, deadline: Deadline) -> None:
        """Wait until a process that died serves again.

        Raises:
            ModelFailed: it will not.
            NotFound: its model was unloaded.
        """
        if not target.startswith("model:"):
            await asyncio.sleep(_POLL_S[-1])
            deadline.check(f"waiting for {target}, which is being restarted,")
            return
        patience = Deadline(MODEL_PATIENCE_S) if deadline.given_s is None else deadline
        for pause_s in _pauses():
            await asyncio.sleep(pause_s)  # first: the row of one that just came back may be older than what we know
            row = await self.row(target.removeprefix("model:"))
            if row.phase is Phase.FAILED:
                raise ModelFailed(
                    f"model {row.model_id!r} failed: {row.reason}", hint="see `barrelctl doctor`, then load it again"
                )
            if row.phase not in (Phase.LOADING, Phase.RESTARTING):
                return
            patience.check(f"waiting for model {row.model_id!r}, which is {row.phase},")

    async def row(self, model_id: str) -> ModelRow:
        """One model's row, as the router has it."""
        return (await self.call("router", protocol.Models(model_id=model_id), protocol.ModelRows)).models[0]

    async def cast(self, target: str, message: Message) -> None:
        """Send without an answer, connecting if need be; nothing happens without a runtime."""
        with contextlib.suppress(BarrelError):
            (await self.connection()).cast(target, message)

    def cast_now(self, target: str, message: Message) -> None:
        """Send without an answer on the connection that is there, if one is."""
        if self._connection is not None:
            self._connection.cast(target, message)

    def close(self) -> None:
        """Close; open calls fail."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.close()
        if self._context is not None:
            self._context.term()
            self._context = None


async def answer(connection: Connection, call: Call, deadline: Deadline, what: str) -> bytes:
    """Wait for a call's answer; the runtime is told when nobody waits any more."""
    try:
        return await within(call.future, deadline, what)
    except (asyncio.CancelledError, DeadlineExceeded):
        connection.cast("router", Cancel(request_id=call.id))
        raise
    finally:
        connection.forget(call)


async def within(waiting: Awaitable[T], deadline: Deadline, what: str) -> T:
    """Wait for something until the deadline; then it is cancelled and `DeadlineExceeded` raised."""
    try:
        return await asyncio.wait_for(waiting, deadline.left_s)
    except TimeoutError:
        raise DeadlineExceeded(f"{what} did not end within {deadline.given_s:g} s") from None


def new_id() -> str:
    """A request id that no other request has."""
    return uuid.uuid4().hex


def _pauses() -> Iterator[float]:
    yield from _POLL_S
    while True:
        yield _POLL_S[-1]
