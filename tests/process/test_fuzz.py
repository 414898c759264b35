"""Bad messages on every socket, floods, and clients that vanish or do not read: nobody dies, everybody else is served."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from barrel_inference import BarrelError, Client, Runtime, codec, protocol
from barrel_inference.protocol import Header, Kind
from barrel_inference.workers.model import options
from tests.process.fuzzing import Fuzzer
from tests.process.killing import POLICY, descriptors, wait_for

FRAMES = int(os.environ.get("BARREL_FUZZ_FRAMES", "4000"))  # to the front door; a quarter to each other socket
SEED = int(os.environ.get("BARREL_FUZZ_SEED", "1"))
SETTINGS: dict[str, Any] = {
    "tiers": {"ram": {"quota_bytes": "16MiB"}, "ram_file": {"quota_bytes": "16MiB"}, "disk": {"quota_bytes": "16MiB"}},
    "supervisor": {"intensity": 0, "model_intensity": 0, "hang_s": 30},
    "limits": {"max_requests_per_client": 64, "max_requests": 256},
}  # fmt: skip
PROMPT = list(range(1, 40))
# A process may grow by this much while it is fuzzed: what its allocator keeps, its caches, and its queues at their limits.
GROWTH_BYTES = 64 << 20


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    """One tree for the module: a single death ends it."""
    with Runtime(SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def client(runtime: Runtime, tiny_models: Mapping[str, Path]) -> Iterator[Client]:
    """A client that behaves, with a model `m`, and a real one, `real`."""
    with runtime.client(timeout_s=60.0) as made:
        made.load_model("m", "m", backend="stub", tier="disk", policy=POLICY, context_opts={"n_seq_max": 4})
        context = {"n_seq_max": 4, "n_ctx": 256, "kv_cells": 512, "n_threads": 1}
        made.load_model(tiny_models["dense"], "real", tier="ram", policy=POLICY, context_opts=context)
        yield made


@pytest.fixture(autouse=True)
def unharmed(runtime: Runtime, client: Client) -> Iterator[None]:
    """After each test every process is the one it was, and a request gets its answer."""
    pids = runtime.processes()
    reply = client.complete("m", PROMPT, response_tokens=4).generated
    yield
    assert client.complete("m", PROMPT, response_tokens=4).generated == reply
    assert runtime.processes() == pids


def dealer(context: "zmq.Context[zmq.Socket[bytes]]", path: Path) -> "zmq.Socket[bytes]":
    """A plain connection."""
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 5000)
    made.setsockopt(zmq.SNDTIMEO, 60_000)
    made.connect(f"ipc://{path}")
    return made


def send_all(path: Path, fuzzer: Fuzzer, count: int, *, as_client: bool) -> int:
    """Send that many fuzzed messages, reading answers on the way; the value is the number of answers."""
    answers = 0
    with zmq.Context() as context, dealer(context, path) as raw:
        for _ in range(count):
            raw.send_multipart(fuzzer.client_frames() if as_client else fuzzer.peer_frames())
            while raw.poll(0):
                raw.recv_multipart()
                answers += 1
        # Everything before this was handled when its answer comes, as messages of one connection are taken in order.
        last = codec.encode(Header(protocol.VERSION, Kind.CALL, "no_such_verb", "the last one"))
        raw.send_multipart([b"router" if as_client else b"", last, b"\x80"])
        while True:
            assert raw.poll(60_000), f"{path.name} does not answer any more"
            if b"the last one" in b"".join(raw.recv_multipart()[:2]):
                return answers
            answers += 1


@contextlib.contextmanager
def served(runtime: Runtime, client: Client) -> Iterator[None]:
    """Meanwhile somebody else asks, one request after the other, and gets the answer; no process grows without bound."""
    before = {name: rss_bytes(pid) for name, pid in runtime.processes().items()}
    reply = client.complete("m", PROMPT, response_tokens=4).generated
    over = threading.Event()

    def ask() -> int:
        count = 0
        while not over.is_set():
            assert client.complete("m", PROMPT, response_tokens=4, deadline_s=60.0).generated == reply
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            yield
        finally:
            over.set()
        assert asked.result() > 0
    grown = {name: rss_bytes(pid) - before[name] for name, pid in runtime.processes().items()}
    assert max(grown.values()) < GROWTH_BYTES, grown


ODD: list[Any] = [
    None, True, -1, 2**63, 1e300, float("nan"), b"\xff", "", "x", "/", "//", "/\0", "file:///%00", "pkg:", "pkg:/",
    [], [5], [[]], [["x"]], [["/x", "y"]], [["/x", 1.0]], [[5, 1.0]], {}, {"x": 1}, {"": {}}, {"n_ctx": []},
]  # fmt: skip


@pytest.mark.parametrize("key", [*options._Given.__struct_fields__, "nothing"])
def test_odd_load_options(client: Client, key: str) -> None:
    """Whatever stands for an option of a load, it is refused as what it is; no process fails over it."""
    for value in ODD:
        for dry_run in (False, True):
            given = {"model_path": "/nowhere.gguf", key: value}
            with pytest.raises(BarrelError) as refused:
                client.load_as_given(protocol.LoadModel(options=given, dry_run=dry_run))
            assert refused.value.code in ("invalid_argument", "bad_model", "not_found"), (value, refused.value)


def test_fuzzed_clients(runtime: Runtime, client: Client) -> None:
    """Random and mutated messages of a client, for every target: errors for answers, nothing else."""
    fuzzer = Fuzzer(SEED, list(runtime.processes()))
    with served(runtime, client):
        assert send_all(runtime.runtime_dir / "router", fuzzer, FRAMES, as_client=True) > 0


@pytest.mark.parametrize(
    "process",
    ["router", "index", "tier:ram", "tier:ram_file", "tier:disk", "writer:0", "pressure", "model:m", "model:real",
     "supervisor"],
)  # fmt: skip
def test_fuzzed_sockets(runtime: Runtime, client: Client, process: str) -> None:
    """The same on each process's own socket, where only our processes should be."""
    fuzzer = Fuzzer(SEED + 1, list(runtime.processes()))
    with served(runtime, client):
        send_all(runtime.runtime_dir / process, fuzzer, FRAMES // 4, as_client=False)


FORGED: dict[str, protocol.Complete] = {
    "a delivered token that no vocabulary has": protocol.Complete(
        prompt=[1, 2, 3], resume=protocol.Resume(attempt=1, token_ids=[2**33], text_bytes=0, seed=1)
    ),
    "more delivered tokens than were asked for": protocol.Complete(
        prompt=[1, 2, 3], response_tokens=2, resume=protocol.Resume(attempt=1, token_ids=[1] * 3, text_bytes=0, seed=1)
    ),
    "more alternatives than there are tokens": protocol.Complete(
        prompt=[1, 2, 3], response_tokens=2, sampling=protocol.Sampling(logprobs=2**40)
    ),
}


@pytest.mark.parametrize("model", ["m", "real"])
@pytest.mark.parametrize("what", FORGED)
def test_requests_no_client_of_ours_sends(runtime: Runtime, what: str, model: str) -> None:
    """A request that would make a model compute for ever, or with tokens that it does not have, is refused."""
    header = Header(protocol.VERSION, Kind.CALL, "complete", "forged")
    with zmq.Context() as context, dealer(context, runtime.runtime_dir / "router") as raw:
        raw.send_multipart([f"model:{model}".encode(), codec.encode(header), codec.encode(FORGED[what])])
        assert raw.poll(30_000)
        _, raw_header, body = raw.recv_multipart()
    assert codec.decode_header(raw_header).kind is Kind.ERROR
    assert codec.decode(body, protocol.ErrorBody).code in ("invalid_argument", "protocol_error")


def test_fuzzed_arena_sockets(runtime: Runtime) -> None:
    """Bytes, silence and a hang-up on the sockets that hand out memory."""
    paths = list(runtime.runtime_dir.glob("*.arena"))
    assert paths
    for path in paths:
        for data in (b"", b"\x00", b"x" * 100_000):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(str(path))
                raw.settimeout(0.5)
                try:
                    raw.sendall(data)
                except OSError:
                    continue


def test_raw_bytes(runtime: Runtime) -> None:
    """What is no ZeroMQ at all, on every socket."""
    fuzzer = Fuzzer(SEED + 2, ["router"])
    for path in runtime.runtime_dir.iterdir():
        if not path.is_socket() or path.suffix == ".arena":
            continue
        for size in (1, 64, 5000):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(str(path))
                raw.sendall(fuzzer.rng.randbytes(size))


def test_oversized_message(runtime: Runtime, client: Client) -> None:
    """A message above the limit ends its connection, and no other."""
    with zmq.Context() as context, dealer(context, runtime.runtime_dir / "router") as raw:
        raw.setsockopt(zmq.LINGER, 0)
        header = codec.encode(Header(protocol.VERSION, Kind.CALL, "complete", "big"))
        raw.send_multipart([b"model:m", header, bytes(protocol.MAX_MESSAGE_BYTES + 1)], copy=False)
        assert not raw.poll(500)
        assert client.complete("m", [5, *PROMPT], response_tokens=1).completion_tokens == 1


def test_flood_is_refused(runtime: Runtime, client: Client) -> None:
    """A client with more requests than it may have gets `overloaded` for the rest; another one is served meanwhile."""
    slow = client.load_model("slow", backend="stub", model_opts={"step_ms": 20}, context_opts={"n_ctx": 4096})
    body = codec.encode(protocol.Complete(prompt=[1, 2, 3], response_tokens=2000))
    with zmq.Context() as context, dealer(context, runtime.runtime_dir / "router") as raw:
        for number in range(500):
            header = codec.encode(Header(protocol.VERSION, Kind.CALL, "complete", f"r{number}", credit=4))
            raw.send_multipart([f"model:{slow}".encode(), header, body])
        refused = 0
        while refused < 500 - 64:
            assert raw.poll(60_000)
            _, raw_header, answer = raw.recv_multipart()
            if codec.decode_header(raw_header).kind is Kind.ERROR:
                assert codec.decode(answer, protocol.ErrorBody).code == "overloaded"
                refused += 1
        assert client.complete("m", [6, *PROMPT], response_tokens=1).completion_tokens == 1
    wait_for(lambda: client.queue_depth(slow) == 0, "the vanished client's requests end")
    client.unload(slow)


def test_flood_of_small_calls(runtime: Runtime, client: Client) -> None:
    """Many thousands of calls that are never read: their sender loses answers, not the runtime its memory."""
    header = Header(protocol.VERSION, Kind.CALL, "tree_status", "r")
    before = rss_bytes(runtime.processes()["router"])
    with zmq.Context() as context, dealer(context, runtime.runtime_dir / "router") as raw:
        raw.setsockopt(zmq.LINGER, 0)
        for number in range(20_000):
            raw.send_multipart(
                [b"supervisor" if number % 2 else b"router", codec.encode(header), codec.encode(protocol.TreeStatus())]
            )
        assert client.complete("m", [7, *PROMPT], response_tokens=1).completion_tokens == 1
    assert rss_bytes(runtime.processes()["router"]) - before < 100 << 20


def test_vanished_clients(runtime: Runtime, client: Client) -> None:
    """A hundred clients that hang up in the middle: their requests end, and no descriptor stays."""
    pids = [runtime.processes()[name] for name in ("router", "model:m")]
    before = [descriptors(pid) for pid in pids]

    def vanish(number: int) -> None:
        body = codec.encode(protocol.Complete(prompt=[number, 2, 3], response_tokens=1000))
        header = codec.encode(Header(protocol.VERSION, Kind.CALL, "complete", f"v{number}", credit=32))
        with zmq.Context() as context, dealer(context, runtime.runtime_dir / "router") as raw:
            raw.send_multipart([b"model:m", header, body])
            raw.poll(200)
            raw.setsockopt(zmq.LINGER, 0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(vanish, range(100)))
    wait_for(lambda: client.queue_depth("m") == 0, "their requests end")
    wait_for(lambda: [descriptors(pid) for pid in pids] <= [count + 2 for count in before], "descriptors are closed")


def test_client_that_does_not_read(runtime: Runtime, client: Client) -> None:
    """A client that grants itself all credit and reads nothing: others are served, its request ends when it has gone."""
    body = codec.encode(protocol.Complete(prompt=[9, 2, 3], response_tokens=2000))
    with zmq.Context() as context, dealer(context, runtime.runtime_dir / "router") as raw:
        raw.setsockopt(zmq.RCVHWM, 1)
        for number in range(8):
            header = codec.encode(Header(protocol.VERSION, Kind.CALL, "complete", f"deaf{number}", credit=2**30))
            raw.send_multipart([b"model:m", header, body])
        for _ in range(20):
            assert client.complete("m", [8, *PROMPT], response_tokens=2, deadline_s=30.0).completion_tokens == 2
    wait_for(lambda: client.queue_depth("m") == 0, "its requests end")


def test_duplicate_request_ids(client: Client, runtime: Runtime) -> None:
    """Two calls of one client with one id: the second takes the first's place, and there is one answer."""
    body = codec.encode(protocol.Complete(prompt=[1, 2, 3], response_tokens=5))
    header = codec.encode(Header(protocol.VERSION, Kind.CALL, "complete", "twin"))
    with zmq.Context() as context, dealer(context, runtime.runtime_dir / "router") as raw:
        raw.send_multipart([b"model:m", header, body])
        raw.send_multipart([b"model:m", header, body])
        assert raw.poll(30_000)
        assert codec.decode_header(raw.recv_multipart()[1]).kind is Kind.DONE
        wait_for(lambda: client.queue_depth("m") == 0, "both are over")


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
