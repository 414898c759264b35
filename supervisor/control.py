"""The supervisor's socket: who is which child, what they say, and the calls that wait for an answer."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from barrel_inference import codec, protocol
from barrel_inference.errors import BarrelError, NotSupported
from barrel_inference.protocol import ErrorBody, Header, Hello, Kind, LoadProgress, Message
from barrel_inference.transport import Frames, Unreachable, bind_router


@dataclass(frozen=True, slots=True)
class _Caller:
    """The way back to who made a call."""

    peer: bytes
    route: bytes
    request_id: str


@dataclass(frozen=True, slots=True)
class Sender:
    """A child that has said hello."""

    id: str
    incarnation: int


# The message; the child it is from, None for anybody else; the number to answer a call by, None for a cast.
OnMessage = Callable[[Message, Sender | None, int | None], None]


class Control:
    """Bound at `<runtime dir>/supervisor`. Only processes of this user can reach it: the directory is private."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", path: Path, log: Any, on_message: OnMessage,
        is_current: Callable[[str, int], bool],
    ) -> None:  # fmt: skip
        self._log = log
        self._is_current = is_current
        self._on_message = on_message
        self._children: dict[str, bytes] = {}
        self._senders: dict[bytes, Sender] = {}
        self._calls: dict[int, _Caller] = {}
        self._last_call = 0
        self._socket = bind_router(context, path, self._on_frames)

    def tell(self, child_ids: Iterable[str], message: Message) -> None:
        """Cast to children. One that cannot be reached is dying or hung, and watched for both."""
        for child_id in child_ids:
            if peer := self._children.get(child_id):
                self._send(_Caller(peer, b"", ""), Kind.CAST, protocol.VERB_OF[type(message)], message)

    def progress(self, call: int, message: LoadProgress) -> None:
        """Send a load's progress to who waits for it."""
        if caller := self._calls.get(call):
            self._send(caller, Kind.EVENT, "load_progress", message)

    def answer(self, call: int, reply: Message | ErrorBody) -> None:
        """End a call; a caller that is gone is no error."""
        if caller := self._calls.pop(call, None):
            self._send(caller, Kind.ERROR if isinstance(reply, ErrorBody) else Kind.DONE, "", reply)

    def forget(self, child_id: str) -> None:
        """The child is gone: what still arrives from it is from nobody."""
        if peer := self._children.pop(child_id, None):
            self._senders.pop(peer, None)

    def close(self) -> None:
        """Close, after the last answers are out."""
        self._socket.close(linger_ms=500)

    def _send(self, to: _Caller, kind: Kind, verb: str, body: Message) -> None:
        header = Header(protocol.VERSION, kind, verb, to.request_id)
        with contextlib.suppress(Unreachable):
            self._socket.send([to.peer, to.route, codec.encode(header), codec.encode(body)])

    def _on_frames(self, frames: Frames) -> None:
        try:
            peer, route, raw_header, body = frames
            header = codec.decode_header(raw_header)
        except (ValueError, BarrelError) as bad:
            self._log.warning("message.rejected", reason=str(bad)[:300])
            return
        call = self._register(_Caller(peer, route, header.request_id)) if header.kind is Kind.CALL else None
        try:
            message = codec.decode_request(header, body)
            # What comes with a route is from a client, through the router.
            if route and header.verb not in protocol.CLIENT_VERBS["supervisor"]:
                raise NotSupported(f"clients may not ask the supervisor to {header.verb}")
        except BarrelError as bad:
            self._log.warning("message.rejected", reason=str(bad)[:300])
            if call is not None:
                self.answer(call, codec.error_body(bad))
            return
        if isinstance(message, Hello):
            if not self._is_current(message.id, message.incarnation):
                self._log.warning("message.rejected", reason=f"hello from {message.id!r}, which is no child of ours")
                return
            self._children[message.id] = peer
            self._senders[peer] = Sender(message.id, message.incarnation)
        self._on_message(message, self._senders.get(peer), call)

    def _register(self, caller: _Caller) -> int:
        self._last_call += 1
        self._calls[self._last_call] = caller
        return self._last_call
