"""A message that came in with the way back, and the connection to another process. Used on the loop of an `Actor` only."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from barrel_inference import codec, protocol
from barrel_inference.errors import BarrelError, DeadlineExceeded, ModelDown, ProtocolError, TierUnavailable
from barrel_inference.protocol import ErrorBody, Header, Kind, Message, Up
from barrel_inference.transport import Frames, Unreachable, connect_dealer, ipc_endpoint

if TYPE_CHECKING:
    from barrel_inference.actor import Actor

M = TypeVar("M", bound=Message)


class Request:
    """One incoming message and the way back to who sent it."""

    __slots__ = (
        "_actor",
        "arrived_s",
        "credit",
        "deadline_s",
        "ended",
        "id",
        "kind",
        "number",
        "peer",
        "route",
        "verb",
    )

    def __init__(self, actor: "Actor", peer: bytes, route: bytes, header: Header) -> None:
        self._actor = actor
        self.peer = peer
        self.route = route
        self.kind = header.kind
        self.verb = header.verb
        self.id = header.request_id
        self.credit = header.credit
        self.arrived_s = time.monotonic()
        self.deadline_s = self.arrived_s + header.deadline_ms / 1000 if header.deadline_ms else None
        self.number = 0
        self.ended = False

    def event(self, kind: str, body: Message) -> None:
        """Send one numbered event; raises `Unreachable` when the caller is gone."""
        self._send(Kind.EVENT, kind, body)

    def done(self, body: Message) -> None:
        """Send the reply that ends the call. A caller that is gone is no error."""
        self._end(Kind.DONE, body)

    def error(self, error: BarrelError) -> None:
        """Send the error that ends the call. A caller that is gone is no error."""
        self._end(Kind.ERROR, codec.error_body(error))

    def cast(self, message: Message) -> None:
        """Tell the process that handed the request on something; it hears it before all that is sent here later."""
        header = Header(protocol.VERSION, Kind.CAST, protocol.VERB_OF[type(message)])
        with contextlib.suppress(Unreachable):
            self._actor.server.send([self.peer, b"", codec.encode(header), codec.encode(message)])

    def _end(self, kind: Kind, body: Message) -> None:
        if self.ended or self.kind is Kind.CAST:
            return
        self.ended = True
        with contextlib.suppress(Unreachable):
            self._send(kind, "", body)

    def _send(self, kind: Kind, verb: str, body: Message) -> None:
        header = Header(protocol.VERSION, kind, verb, self.id, self.number)
        self._actor.server.send([self.peer, self.route, codec.encode(header), codec.encode(body)])
        self.number += 1


class Peer:
    """The connection to another process, one per incarnation of it.

    Calls fail at once with the peer's own down error when it is not up, or dies before it answers: nothing waits for the
    next incarnation.
    """

    def __init__(self, actor: "Actor", peer_id: str, up: Up | None) -> None:
        self._actor = actor
        self.id = peer_id
        self.incarnation = up.incarnation if up else 0
        self.pid = up.pid if up else 0
        self.group = up.group if up else ""
        self.about = up.about if up else {}
        self._pending: dict[
            str, tuple[asyncio.Future[Message], type[Message], Callable[[str, bytes], None] | None]
        ] = {}
        self._next_id = 0
        self.socket = connect_dealer(actor.context, ipc_endpoint(actor.runtime_dir / peer_id), self._on_frames)
        # Set by the router: answers that carry a client's route are passed on unopened.
        self.on_routed: Callable[[Peer, Frames], None] | None = None

    async def call(
        self, message: Message, reply: type[M], *, deadline_s: float | None = None,
        on_event: Callable[[str, bytes], None] | None = None,
    ) -> M:  # fmt: skip
        """Send a call and wait for its reply; raises what the peer reported, `DeadlineExceeded`, or that it is down."""
        self._next_id += 1
        request_id = f"{self._actor.id}.{self._next_id}"
        header = Header(
            protocol.VERSION, Kind.CALL, protocol.VERB_OF[type(message)], request_id,
            deadline_ms=int(deadline_s * 1000) if deadline_s else 0,
        )  # fmt: skip
        future: asyncio.Future[Message] = self._actor.loop.create_future()
        self._pending[request_id] = (future, reply, on_event)
        try:
            self.socket.send([b"", codec.encode(header), codec.encode(message)])
            return cast(M, await asyncio.wait_for(future, deadline_s))
        except Unreachable:
            raise self._down_error("cannot be reached") from None
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.id} did not answer {header.verb} within {deadline_s} s", process=self.id
            ) from None
        finally:
            self._pending.pop(request_id, None)

    def cast(self, message: Message) -> bool:
        """Send without an answer; False when the peer cannot be reached."""
        header = Header(protocol.VERSION, Kind.CAST, protocol.VERB_OF[type(message)])
        try:
            self.socket.send([b"", codec.encode(header), codec.encode(message)])
        except Unreachable:
            return False
        return True

    def close(self, reason: str) -> None:
        """The peer is down: fail what waits for it."""
        self.socket.close()
        for future, _, _ in self._pending.values():
            if not future.done():
                future.set_exception(self._down_error(reason))
        self._pending.clear()

    def _down_error(self, reason: str) -> BarrelError:
        cls = TierUnavailable if self.id.startswith("tier:") else ModelDown
        return cls(f"{self.id} is down ({reason})", process=self.id)

    def _on_frames(self, frames: Frames) -> None:
        try:
            route, raw_header, body = frames
            if route and self.on_routed:
                self.on_routed(self, frames)
                return
            header = codec.decode_header(raw_header)
            if header.kind is Kind.CAST:
                self._actor.dispatch(Request(self._actor, b"", b"", header), header, body)
                return
            waiting = self._pending.get(header.request_id)
            if waiting is None:
                return
            future, reply, on_event = waiting
            if header.kind is Kind.EVENT:
                if on_event:
                    on_event(header.verb, body)
            elif not future.done():
                if header.kind is Kind.DONE:
                    future.set_result(codec.decode(body, reply))
                else:
                    future.set_exception(codec.error_from(codec.decode(body, ErrorBody)))
        except (ValueError, ProtocolError) as bad:
            self._actor.rejected(f"from {self.id}: {bad}")
