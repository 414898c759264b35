"""One connection of a client to the router: calls out, answers in, and the news that it broke."""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from barrel_inference import codec, curve, protocol
from barrel_inference.config import default_runtime_dir
from barrel_inference.errors import ProtocolError
from barrel_inference.protocol import ErrorBody, Header, Kind, Message
from barrel_inference.resubmission import ConnectionLost
from barrel_inference.transport import Frames, LinkNews, Unreachable, connect_dealer

# A local connection takes a millisecond; a router that does not shake hands in this time is stopped or hung.
CONNECT_DEADLINE_S = 2.0

# A request that is queued or runs is heard of twice a second. Silence for so long means that its answer got lost.
SILENCE_S = 30.0
SILENCE_CHECK_S = 5.0

OnEvent = Callable[[str, bytes], None]


class Call:
    """One call that waits for its answer: `future` becomes the body of `done`, or its error."""

    __slots__ = ("future", "heard_s", "id", "next_number", "on_event")

    def __init__(self, request_id: str, future: "asyncio.Future[bytes]", on_event: OnEvent | None) -> None:
        self.id = request_id
        self.future = future
        self.on_event = on_event
        self.next_number = 0
        self.heard_s = time.monotonic()


class Connection:
    """Made by `connect`. After it broke, everything on it fails with `ConnectionLost`; it is never repaired."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: dict[str, Call] = {}
        self._linked: asyncio.Future[bool] = self._loop.create_future()
        self.is_lost = False
        self.is_refused = False  # the runtime does not know this client's key
        self._socket = connect_dealer(context, endpoint, self._on_frames, self._on_link, curve.client_keys(endpoint))
        self._silence_timer = self._loop.call_later(SILENCE_CHECK_S, self._check_silence)

    async def linked(self) -> bool:
        """Whether the connection could be made; returns as soon as that is known."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._linked), CONNECT_DEADLINE_S)
        except TimeoutError:
            return False

    def start(
        self, target: str, message: Message, *, request_id: str, deadline_ms: int = 0, credit: int = 0,
        on_event: OnEvent | None = None,
    ) -> Call:  # fmt: skip
        """Send a call; raises `ConnectionLost` if it cannot be sent."""
        verb = protocol.VERB_OF[type(message)]
        header = Header(protocol.VERSION, Kind.CALL, verb, request_id, deadline_ms=deadline_ms, credit=credit)
        body = codec.encode(message)
        if len(body) > protocol.MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(body)} bytes, the limit is {protocol.MAX_MESSAGE_BYTES}")
        call = self._calls[request_id] = Call(request_id, self._loop.create_future(), on_event)
        try:
            self._send(target, header, body)
        except ConnectionLost:
            self.forget(call)
            raise
        return call

    def cast(self, target: str, message: Message) -> None:
        """Send without an answer; nothing happens if the connection is lost."""
        if not self.is_lost:
            header = Header(protocol.VERSION, Kind.CAST, protocol.VERB_OF[type(message)])
            try:
                self._send(target, header, codec.encode(message))
            except ConnectionLost:
                self.lose()

    def forget(self, call: Call) -> None:
        """Nobody waits for this call any more."""
        if self._calls.get(call.id) is call:
            del self._calls[call.id]

    def lose(self) -> None:
        """Give the connection up: every call on it fails with `ConnectionLost`."""
        self.close(linger_ms=0)

    def close(self, linger_ms: int = 200) -> None:
        """Close; what was just sent (a cancel) still has `linger_ms` to get out."""
        if self.is_lost:
            return
        self.is_lost = True
        self._silence_timer.cancel()
        self._socket.close(linger_ms)
        if not self._linked.done():
            self._linked.set_result(False)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.future.done():
                call.future.set_exception(ConnectionLost())
                call.future.exception()  # whoever waited may be gone: then this is nobody's loss

    def _send(self, target: str, header: Header, body: bytes) -> None:
        try:
            self._socket.send([target.encode(), codec.encode(header), body])
        except Unreachable:
            raise ConnectionLost from None

    def _on_link(self, news: LinkNews) -> None:
        self.is_refused = self.is_refused or news == "refused"
        if news == "stands" and not self._linked.done():
            self._linked.set_result(True)
        elif news != "stands":
            # Not from inside the monitor's own callback: closing the socket closes the monitor.
            self._loop.call_soon(self.lose)

    def _on_frames(self, frames: Frames) -> None:
        if len(frames) != 3:
            return
        try:
            header = codec.decode_header(frames[1])
        except ProtocolError:
            self.lose()  # this is no router of ours
            return
        call = self._calls.get(header.request_id)
        if call is None or call.future.done():
            return
        try:
            self._on_answer(call, header, frames[2])
        except (
            Exception
        ) as bad:  # a body that does not parse, or whatever the caller's own callback raised: it is the caller's
            self.forget(call)
            if not call.future.done():
                call.future.set_exception(bad)

    def _on_answer(self, call: Call, header: Header, body: bytes) -> None:
        call.heard_s = time.monotonic()
        if header.kind is Kind.EVENT:
            if header.number != call.next_number:
                self.lose()  # an event got lost: better the whole request again than a gap in its text
                return
            call.next_number += 1
            if call.on_event:
                call.on_event(header.verb, body)
            return
        self.forget(call)
        if header.kind is Kind.DONE:
            call.future.set_result(body)
        else:
            call.future.set_exception(codec.error_from(codec.decode(body, ErrorBody)))

    def _check_silence(self) -> None:
        oldest_s = time.monotonic() - SILENCE_S
        if any(call.next_number and call.heard_s < oldest_s for call in self._calls.values()):
            self.lose()
        else:
            self._silence_timer = self._loop.call_later(SILENCE_CHECK_S, self._check_silence)


def is_forbidden(endpoint: str) -> bool:
    """Is this router's socket in a directory that is closed to this user?"""
    try:
        os.stat(endpoint.removeprefix("ipc://"))
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def is_anothers(endpoint: str) -> bool:
    """Did another user make what is this user's directory in the shared temporary one? Then nobody there is to be trusted."""
    directory = default_runtime_dir({})
    if endpoint != f"ipc://{directory / 'router'}":
        return False
    try:
        return directory.lstat().st_uid != os.getuid()
    except OSError:
        return False


def has_supervisor(endpoint: str) -> bool | None:
    """Does a supervisor live beside this router's socket? Then the router is only being restarted. None: it cannot be seen."""
    if not endpoint.startswith("ipc://"):
        return None
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    probe.settimeout(0.2)
    try:
        probe.connect(str(Path(endpoint.removeprefix("ipc://")).with_name("supervisor")))
    except PermissionError:
        return True  # it is another user's, and there
    except OSError:
        return False
    finally:
        probe.close()
    return True
