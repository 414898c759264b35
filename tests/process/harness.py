"""A supervisor that does what the test says: real child processes, and peers that exist by name only."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import zmq

from barrel_inference import codec, protocol
from barrel_inference.protocol import Down, ErrorBody, Header, Kind, Message, Up
from barrel_inference.transport import ipc_endpoint

M = TypeVar("M", bound=Message)
DEADLINE_S = 20.0


class Child:
    """One real process, started as the supervisor starts it."""

    def __init__(self, tree: "Tree", module: str, child_id: str, incarnation: int, boot: dict[str, Any]) -> None:
        self.id = child_id
        self.incarnation = incarnation
        self.ready: protocol.Ready | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, child_id], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        document = {
            "id": child_id, "incarnation": incarnation, "runtime_dir": str(tree.runtime_dir),
            "state_dir": str(tree.runtime_dir), "parent_pid": os.getpid(), "settings": tree.settings, "boot": boot,
            "log_level": "error",
        }  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(document).encode() + b"\n")
        self.process.stdin.flush()

    def up(self) -> Up:
        """What peers are told of it."""
        assert self.ready is not None
        return Up(
            id=self.id, incarnation=self.incarnation, pid=self.process.pid, group="helper", about=self.ready.about
        )

    def end(self, number: signal.Signals) -> int:
        """Signal it and reap it; its exit status. A crash report fails the test."""
        self.process.send_signal(number)
        self.process.wait(DEADLINE_S)  # before its input is closed, which would tell it that its parent is gone
        _out, errors = self.process.communicate()
        assert b"Traceback" not in errors, errors.decode()
        return self.process.returncode


class Caller:
    """Connections to children under one name, as a model or writer of that name would have them."""

    def __init__(self, tree: "Tree", caller_id: str) -> None:
        self.id = caller_id
        self._tree = tree
        self._sockets: dict[tuple[str, int], zmq.Socket[bytes]] = {}
        self._numbers = itertools.count(1)
        self._early: dict[str, tuple[Header, bytes]] = {}

    def ask(self, child_id: str, message: Message, *, deadline_ms: int = 0) -> str:
        """Send a call; the id to wait for."""
        request_id = f"{self.id}.{next(self._numbers)}"
        self._send(child_id, Header(protocol.VERSION, Kind.CALL, protocol.VERB_OF[type(message)], request_id,
                                    deadline_ms=deadline_ms), message)  # fmt: skip
        return request_id

    def answer(self, child_id: str, request_id: str, reply: type[M]) -> M:
        """The reply to a call, while the supervisor goes on serving; raises what the child reported."""
        socket = self._socket(child_id)
        while request_id not in self._early:
            self._tree.until(lambda: bool(socket.poll(0)))
            _route, raw_header, body = socket.recv_multipart()
            header = codec.decode_header(raw_header)
            self._early[header.request_id] = (header, body)
        header, body = self._early.pop(request_id)
        if header.kind is Kind.ERROR:
            raise codec.error_from(codec.decode(body, ErrorBody))
        return codec.decode(body, reply)

    def call(self, child_id: str, message: Message, reply: type[M]) -> M:
        """Send a call and wait for its reply."""
        return self.answer(child_id, self.ask(child_id, message), reply)

    def cast(self, child_id: str, message: Message) -> None:
        """Send without an answer."""
        self._send(child_id, Header(protocol.VERSION, Kind.CAST, protocol.VERB_OF[type(message)]), message)

    def _send(self, child_id: str, header: Header, message: Message) -> None:
        self._socket(child_id).send_multipart([b"", codec.encode(header), codec.encode(message)])

    def _socket(self, child_id: str) -> "zmq.Socket[bytes]":
        name = (child_id, self._tree.children[child_id].incarnation)
        if name not in self._sockets:
            socket = self._sockets[name] = self._tree.context.socket(zmq.DEALER)
            socket.connect(ipc_endpoint(self._tree.runtime_dir / child_id))
        return self._sockets[name]


class Tree:
    """The supervisor's place, and the children below it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        # Short, because a socket's path has to be.
        self.runtime_dir = Path(tempfile.mkdtemp(prefix="bi-"))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.children: dict[str, Child] = {}
        self._pretended: dict[str, Up] = {}
        self._incarnations = itertools.count(1000)
        self._identities: dict[str, bytes] = {}
        self._socket = self.context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(ipc_endpoint(self.runtime_dir / "supervisor"))

    def start(self, module: str, child_id: str, boot: dict[str, Any] | None = None) -> Child:
        """A child that is ready, and that knows its peers as they know it."""
        child = self.children[child_id] = Child(self, module, child_id, next(self._incarnations), boot or {})
        self.until(lambda: child.ready is not None)
        for other in self.children.values():
            if other is not child:
                self._tell(other, child.up())
                self._tell(child, other.up())
        for up in self._pretended.values():
            self._tell(child, up)
        return child

    def pretend(self, peer_id: str) -> int:
        """Say that a process serves which does not exist; its incarnation."""
        up = Up(id=peer_id, incarnation=next(self._incarnations), pid=1, group="model", about={})
        self._pretended[peer_id] = up
        for child in self.children.values():
            self._tell(child, up)
        return up.incarnation

    def bury(self, peer_id: str) -> None:
        """Say that a pretended process died."""
        self._announce_death(peer_id, self._pretended.pop(peer_id).incarnation)

    def kill(self, child_id: str) -> None:
        """SIGKILL, reaped, and everybody is told."""
        child = self.children.pop(child_id)
        child.end(signal.SIGKILL)
        for name in (child_id, f"{child_id}.arena"):
            (self.runtime_dir / name).unlink(missing_ok=True)
        self._announce_death(child_id, child.incarnation)

    def until(self, condition: Callable[[], bool]) -> None:
        """Serve until a condition holds; fails after a deadline."""
        give_up_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < give_up_s, "the condition never held"
            for child in self.children.values():
                if child.process.poll() is not None:
                    child.end(signal.SIGKILL)
                    raise AssertionError(f"{child.id} ended with {child.process.returncode}")
            if self._socket.poll(10):
                self._serve()

    def tell(self, child_id: str, message: Message) -> None:
        """Cast to a child, as its supervisor."""
        self._tell(self.children[child_id], message)

    def close(self) -> None:
        """End everything."""
        for child in self.children.values():
            child.process.kill()
            child.process.communicate()
        self.context.destroy(0)
        shutil.rmtree(self.runtime_dir)

    def _announce_death(self, child_id: str, incarnation: int) -> None:
        for child in self.children.values():
            self._tell(child, Down(id=child_id, incarnation=incarnation, reason="signal SIGKILL", restarting=True))

    def _tell(self, child: Child, message: Message) -> None:
        header = Header(protocol.VERSION, Kind.CAST, protocol.VERB_OF[type(message)])
        self._socket.send_multipart([self._identities[child.id], b"", codec.encode(header), codec.encode(message)])

    def _serve(self) -> None:
        identity, _route, raw_header, body = self._socket.recv_multipart()
        message = codec.decode_request(codec.decode_header(raw_header), body)
        if isinstance(message, protocol.Hello):
            self._identities[message.id] = identity
        elif isinstance(message, protocol.Ready):
            for child in self.children.values():
                if child.incarnation == message.incarnation:
                    child.ready = message
