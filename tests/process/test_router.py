"""The router as a plain client sees it, one that speaks the protocol without our code: msgpack over ZeroMQ."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from barrel_inference import Client, Runtime
from barrel_inference.protocol import MAX_MESSAGE_BYTES
from tests.process.killing import wait_for

DEADLINE_S = 30
CONFIG = {
    "tiers": {"ram": {"quota_bytes": "64MiB"}, "ram_file": {"enabled": False}, "disk": {"enabled": False}},
    "writer": {"processes": 1},
    "limits": {"max_requests_per_client": 3},
    "supervisor": {"intensity": 100, "model_intensity": 100, "backoff_max_s": 0.05},
}


class PlainClient:
    """A DEALER that sends what it is told, well-formed or not."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def send(self, *frames: bytes) -> None:
        """Any frames."""
        self._socket.send_multipart(list(frames))

    def call(self, target: str, verb: str, body: dict[str, Any], request_id: str = "1", *, credit: int = 0) -> None:
        """A call."""
        header = msgpack.packb([1, "call", verb, request_id, 0, 0, credit])
        self.send(target.encode(), header, msgpack.packb(body))

    def cast(self, target: str, verb: str, body: dict[str, Any]) -> None:
        """A cast."""
        self.send(target.encode(), msgpack.packb([1, "cast", verb]), msgpack.packb(body))

    def receive(self, *, timeout_ms: int = DEADLINE_S * 1000) -> tuple[list[Any], dict[str, Any]]:
        """Header and body of the next message that is no progress."""
        while True:
            assert self._socket.poll(timeout_ms), "no answer"
            route, header, body = self._socket.recv_multipart()
            assert route == b""
            fields = msgpack.unpackb(header)
            if fields[2] != "progress":
                return fields, msgpack.unpackb(body)

    def answer(self) -> tuple[str, dict[str, Any]]:
        """Kind and body of the next message that ends a call."""
        while True:
            fields, body = self.receive()
            if fields[1] in ("done", "error"):
                return fields[1], body

    def close(self) -> None:
        """Go without a word."""
        self._socket.close()
        self._context.term()


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    """One tree for the module, with a slow stub model `slow` and a quick one `quick`."""
    with Runtime(CONFIG) as made:
        with made.client() as client:
            for name, step_ms in (("slow", 20), ("quick", 0)):
                client.load_model(
                    name, name, backend="stub", model_opts={"step_ms": step_ms},
                    context_opts={"n_ctx": 4096, "n_seq_max": 4},
                )  # fmt: skip
        yield made


@pytest.fixture
def client(runtime: Runtime) -> Iterator[Client]:
    """Our own client, to look at what the plain one has done."""
    with runtime.client() as made:
        yield made


@pytest.fixture
def plain(runtime: Runtime) -> Iterator[PlainClient]:
    """A client that is not ours."""
    made = PlainClient(runtime.endpoint)
    yield made
    made.close()


def test_greeting(plain: PlainClient) -> None:
    """The greeting tells a client the version and the limits, because a message over them gets no answer."""
    plain.call("router", "greet", {"version": 1})
    kind, body = plain.answer()
    assert kind == "done"
    assert (body["version"], body["max_message_bytes"]) == (1, MAX_MESSAGE_BYTES)


def test_stream_of_a_plain_client(plain: PlainClient) -> None:
    """Events are numbered from 0, respect the credit, and end with exactly one `done`."""
    plain.call("model:quick", "complete", {"prompt": "1 2 3", "response_tokens": 5}, credit=2)
    numbers, text = [], b""
    while True:
        header, body = plain.receive()
        numbers.append(header[4])
        if header[1] == "done":
            break
        text += body["data"]
        plain.cast("model:quick", "credit", {"request_id": "1", "events": 1})
    assert numbers == sorted(set(numbers))
    assert text == body["reply_bytes"]
    assert body["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("target", "verb", "body", "code"),
    [
        ("nobody", "greet", {}, "not_found"),
        ("model:nobody", "complete", {"prompt": "x"}, "not_found"),
        ("router", "explode", {}, "protocol_error"),
        ("router", "lookup", {}, "not_supported"),
        ("index", "reserve", {}, "not_supported"),
        ("supervisor", "stop_tree", {}, "not_supported"),
        ("supervisor", "start_child", {}, "not_supported"),
        ("tier:ram", "room", {}, "not_found"),
        ("", "up", {}, "protocol_error"),
        ("", "down", {}, "protocol_error"),
        ("model:quick", "release_idle", {}, "not_supported"),
        ("model:quick", "complete", {"prompt": 5}, "protocol_error"),
        ("model:quick", "complete", {"nonsense": 5}, "protocol_error"),
        ("router", "load_model", {"model_id": "a/b", "options": {"model_path": "x", "backend": "stub"}}, "invalid_argument"),
        ("router", "load_model", {"model_id": "quick", "options": {"model_path": "x", "backend": "stub"}}, "already_loaded"),
        ("router", "load_model", {"options": {"model_path": "no-such-name"}}, "not_found"),
        ("router", "unload", {"model_id": "nobody"}, "not_found"),
        ("router", "models", {"model_id": "nobody"}, "not_found"),
    ],
)  # fmt: skip
def test_refused(plain: PlainClient, target: str, verb: str, body: dict[str, Any], code: str) -> None:
    """What a client may not ask, or not so, gets an error with a code, and nothing else happens."""
    plain.call(target, verb, body)
    kind, answer = plain.answer()
    assert (kind, answer["code"]) == ("error", code)


def test_malformed_messages(plain: PlainClient, client: Client) -> None:
    """Garbage is answered where it names a request, else counted and dropped; the router goes on."""
    rejected = client.counters()["messages_rejected"]
    plain.send(b"router")
    plain.send(b"router", b"\xc1", b"")
    plain.send(b"router", msgpack.packb([1, "call", "greet", "a", "b"]), b"")
    plain.send(b"model:quick", msgpack.packb([1, "event", "token", "2"]), b"")
    plain.send(b"router", msgpack.packb([99, "call", "greet", "3"]), b"")
    plain.send(b"router", msgpack.packb([1, "call", "greet", "4"]), b"\xc1")
    plain.send(b"router", msgpack.packb([1, "call", "greet", ""]), msgpack.packb({}))
    plain.send(b"\xff\xfe", msgpack.packb([1, "call", "greet", "5"]), msgpack.packb({}))
    plain.send(b"router", msgpack.packb([1, "call", "greet", "x" * 5000]), b"")
    plain.call("router", "greet", {}, "last")
    errors = {}
    while True:
        header, body = plain.receive()
        if header[3] == "last":
            break
        errors[header[3]] = body["code"]
    assert errors == {
        "a": "protocol_error", "2": "protocol_error", "3": "protocol_error", "4": "protocol_error", "5": "not_found",
    }  # fmt: skip
    wait_for(lambda: client.counters()["messages_rejected"] >= rejected + 7)


def test_limit_per_client(plain: PlainClient) -> None:
    """The fourth request of a client that may have three is overloaded, retryable; others are not affected."""
    for number in range(4):
        plain.call("model:slow", "complete", {"prompt": f"{number}", "response_tokens": 500}, f"{number}", credit=1000)
    while (header := plain.receive())[0][1] != "error":
        pass
    assert (header[0][3], header[1]["code"], header[1]["retryable"]) == ("3", "overloaded", True)
    for number in range(3):
        plain.cast("router", "cancel", {"request_id": f"{number}"})
    assert {plain.answer()[0] for _ in range(3)} == {"done"}


def test_vanished_client(runtime: Runtime, client: Client) -> None:
    """A client that goes without a word: its request ends, and its sequence is free."""
    gone = PlainClient(runtime.endpoint)
    gone.call("model:slow", "complete", {"prompt": "1", "response_tokens": 4000}, credit=4)
    gone.receive()
    gone.close()
    wait_for(lambda: client.queue_depth("slow") == 0)


def test_death_of_a_model(plain: PlainClient, client: Client) -> None:
    """Every request that a dead model had gets one retryable error; its row says restarting, then idle, with the count."""
    restarts = client.model_info("slow").restarts
    for number in range(2):
        plain.call("model:slow", "complete", {"prompt": f"{number}", "response_tokens": 500}, f"{number}", credit=1000)
        plain.receive()
    os.kill(client.processes()["model:slow"], signal.SIGKILL)
    answers = [plain.answer() for _ in range(2)]
    assert [(kind, body["code"], body["retryable"]) for kind, body in answers] == [("error", "model_down", True)] * 2
    wait_for(lambda: client.model_info("slow").phase == "idle")
    assert client.model_info("slow").restarts == restarts + 1
    wait_for(lambda: client.counters()["restarts"] >= 1)


def test_router_restart(runtime: Runtime, client: Client) -> None:
    """A router that was killed knows every model again, by what the supervisor and the models say."""
    before = {info.model_id: info.backend for info in client.models()}
    os.kill(client.processes()["router"], signal.SIGKILL)
    wait_for(lambda: {info.model_id: info.backend for info in client.models()} == before)
    assert client.complete("quick", "1 2", response_tokens=2).completion_tokens == 2


def test_observers_do_not_cross_the_model(client: Client) -> None:
    """With the model process stopped dead, the observers answer."""
    pid = client.processes()["model:slow"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert client.phase("slow") == "idle"
        assert client.pending_len("slow") == client.queue_depth("slow") == 0
        client.last_cache_hit("slow")
        assert client.status()["models"]
    finally:
        os.kill(pid, signal.SIGCONT)


def test_unknown_models_for_observers(client: Client) -> None:
    """An unknown model is idle, has nothing pending, and was never hit."""
    assert (client.phase("nobody"), client.pending_len("nobody"), client.last_cache_hit("nobody")) == ("idle", 0, None)


def test_recent_requests(plain: PlainClient, client: Client) -> None:
    """The last finished requests are listed newest first, with figures and without any text."""
    for number in range(2):
        client.complete("quick", f"7 8 {number}", response_tokens=number + 1)
    wait_for(lambda: [row["completion_tokens"] for row in client.recent_requests(2)] == [2, 1])
    assert all("reply" not in row and "prompt" not in row for row in client.recent_requests())


def test_unload_only_if_idle(plain: PlainClient, client: Client) -> None:
    """An unload on the condition that nothing is under way is refused while the router waits for any answer of the model."""
    client.load_model("any", "kept", backend="stub", model_opts={"step_ms": 50}, context_opts={"n_ctx": 50_000})
    with client.stream("kept", "go", response_tokens=40_000) as stream:
        next(stream)
        plain.call("router", "unload", {"model_id": "kept", "if_idle": True})
        kind, body = plain.answer()
        assert (kind, body["code"]) == ("error", "overloaded")
        assert next(stream).kind == "token", "the request goes on"
    wait_for(lambda: client.queue_depth("kept") == 0)
    plain.call("router", "unload", {"model_id": "kept", "if_idle": True})
    assert plain.answer()[0] == "done"
    assert "kept" not in {row.model_id for row in client.models()}
