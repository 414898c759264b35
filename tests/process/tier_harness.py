"""The world around one real tier or writer process: a supervisor and an index that say what the test wants them to say."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

from barrel_inference import codec, protocol
from barrel_inference.errors import BarrelError
from barrel_inference.protocol import Header, Kind, Message
from barrel_inference.transport import ipc_endpoint

M = TypeVar("M", bound=Message)
DEADLINE_S = 20.0


@contextlib.contextmanager
def small_file_system(above: Path) -> Iterator[Path]:
    """A directory on a file system of 1 MiB; the test is skipped where it cannot be made."""
    path = Path(tempfile.mkdtemp(dir=above))
    may_mount = shutil.which("mount") is not None and os.getuid() == 0
    if not may_mount or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)]).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


class World:
    """Sockets at the places of the supervisor and the index, and what arrived there."""

    def __init__(self) -> None:
        self.runtime_dir = Path(tempfile.mkdtemp(prefix="bi-"))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.poller = zmq.Poller()
        self.supervisor = self._server("supervisor")
        self.index: zmq.Socket[bytes] | None = None
        self.heard: list[Message] = []  # by the index
        self.told: list[Message] = []  # to the supervisor
        self.identities: dict[str, bytes] = {}
        self.children: list[Child] = []
        self.refuse: dict[type[Message], BarrelError] = {}  # what the index answers with an error

    def child(
        self, module: str, child_id: str, boot: dict[str, Any], environment: dict[str, str] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> "Child":  # fmt: skip
        """A running child that said it is ready."""
        child = Child(self, module, child_id, boot, environment or {}, settings)
        self.children.append(child)
        self.until(lambda: any(isinstance(m, protocol.Ready) and m.incarnation == child.incarnation for m in self.told))
        return child

    def index_up(self, child: "Child", incarnation: int) -> None:
        """An index serves from now on."""
        if self.index is None:
            self.index = self._server("index")
        self.tell(child, protocol.Up(id="index", incarnation=incarnation, pid=1, group="helper", about={}))

    def index_down(self, child: "Child", incarnation: int) -> None:
        """The index died; the next one hears only what comes then."""
        assert self.index is not None
        self.poller.unregister(self.index)
        self.index.close(0)
        self.index = None
        self.heard.clear()
        self.tell(child, protocol.Down(id="index", incarnation=incarnation, reason="killed", restarting=True))

    def tell(self, child: "Child", message: Message) -> None:
        """Cast by the supervisor."""
        header = Header(protocol.VERSION, Kind.CAST, protocol.VERB_OF[type(message)])
        self.supervisor.send_multipart([self.identities[child.id], b"", codec.encode(header), codec.encode(message)])

    def until(self, condition: Callable[[], bool]) -> None:
        """Serve until a condition holds; fails after a deadline."""
        give_up_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < give_up_s, f"index heard {self.heard}, supervisor {self.told[-5:]}"
            for socket, _events in self.poller.poll(50):
                self._serve(socket)

    def heard_of(self, cls: type[M]) -> list[M]:
        """What the index heard of one kind."""
        return [message for message in self.heard if isinstance(message, cls)]

    def close(self) -> None:
        """End everything."""
        try:
            for child in self.children:
                child.kill()
        finally:
            self.context.destroy(0)
            shutil.rmtree(self.runtime_dir)

    def _server(self, name: str) -> "zmq.Socket[bytes]":
        socket = self.context.socket(zmq.ROUTER)
        socket.bind(ipc_endpoint(self.runtime_dir / name))
        self.poller.register(socket, zmq.POLLIN)
        return socket

    def _serve(self, socket: "zmq.Socket[bytes]") -> None:
        identity, route, raw_header, body = socket.recv_multipart()
        header = codec.decode_header(raw_header)
        message = codec.decode_request(header, body)
        if socket is self.supervisor:
            self.told.append(message)
            if isinstance(message, protocol.Hello):
                self.identities[message.id] = identity
            return
        self.heard.append(message)
        if header.kind is Kind.CALL:
            refusal = self.refuse.get(type(message))
            kind, reply = (Kind.ERROR, codec.error_body(refusal)) if refusal else (Kind.DONE, protocol.Ok())
            answer = Header(protocol.VERSION, kind, "", header.request_id)
            socket.send_multipart([identity, route, codec.encode(answer), codec.encode(reply)])


class Child:
    """One real process under test."""

    next_incarnation = 100

    def __init__(
        self, world: World, module: str, child_id: str, boot: dict[str, Any], environment: dict[str, str],
        settings: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        Child.next_incarnation += 1
        self.world = world
        self.id = child_id
        self.incarnation = Child.next_incarnation
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, child_id],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | environment,
        )  # fmt: skip
        document = {
            "id": child_id, "incarnation": self.incarnation, "runtime_dir": str(world.runtime_dir),
            "state_dir": str(world.runtime_dir), "parent_pid": os.getpid(), "settings": settings or {},
            "boot": boot, "log_level": "error",
        }  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(document).encode() + b"\n")
        self.process.stdin.flush()
        self.socket = world.context.socket(zmq.DEALER)
        self.socket.connect(ipc_endpoint(world.runtime_dir / child_id))
        self._calls = 0

    @property
    def about(self) -> dict[str, Any]:
        """What it told its peers when it was ready."""
        ready = [m for m in self.world.told if isinstance(m, protocol.Ready) and m.incarnation == self.incarnation]
        return ready[0].about

    def cast(self, message: Message) -> None:
        """Send without an answer."""
        header = Header(protocol.VERSION, Kind.CAST, protocol.VERB_OF[type(message)])
        self.socket.send_multipart([b"", codec.encode(header), codec.encode(message)])

    def ask(self, message: Message) -> str:
        """Send a call; the request id to wait for."""
        self._calls += 1
        request_id = f"test.{self._calls}"
        header = Header(protocol.VERSION, Kind.CALL, protocol.VERB_OF[type(message)], request_id)
        self.socket.send_multipart([b"", codec.encode(header), codec.encode(message)])
        return request_id

    def call(self, message: Message, reply: type[M]) -> M:
        """Send a call and serve the world until its answer is there; raises what the child reported."""
        request_id = self.ask(message)
        self.world.until(lambda: bool(self.socket.poll(0)) or self.process.poll() is not None)
        assert self.process.poll() is None, self._reaped()
        _route, raw_header, body = self.socket.recv_multipart()
        header = codec.decode_header(raw_header)
        assert header.request_id == request_id
        if header.kind is Kind.ERROR:
            raise codec.error_from(codec.decode(body, protocol.ErrorBody))
        return codec.decode(body, reply)

    def terminate(self) -> int:
        """SIGTERM; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        self.world.until(lambda: self.process.poll() is not None)
        return self._reaped()

    def kill(self) -> int:
        """SIGKILL; its exit status."""
        self.process.kill()
        return self._reaped()

    def wait(self) -> int:
        """Its exit status, when it ends by itself."""
        self.world.until(lambda: self.process.poll() is not None)
        return self._reaped()

    def _reaped(self) -> int:
        _out, errors = self.process.communicate()
        assert b"Traceback" not in errors, errors.decode()
        return self.process.returncode
