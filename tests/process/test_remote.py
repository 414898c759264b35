"""Clients over TCP: who gets in, what they may ask, and that tenants share nothing."""

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq.auth

from barrel_inference import BarrelError, Client, InvalidArgument, NoRuntime, NotSupported, Runtime
from barrel_inference.protocol import Reload, Reloaded
from barrel_inference.runtime import ask_supervisor
from tests.process.test_router import PlainClient

CLIENTS = ("alice", "bob")
PROMPT = " ".join(str(number) for number in range(20))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's directory, one for each client, and one of somebody unknown."""
    folder = tmp_path_factory.mktemp("curve")
    (folder / "server" / "clients").mkdir(parents=True)
    public, _ = zmq.auth.create_certificates(folder / "server", "server")
    for name in (*CLIENTS, "stranger"):
        (folder / name).mkdir()
        shutil.copy(public, folder / name / "server.key")
        own, _ = zmq.auth.create_certificates(folder / name, "client")
        if name in CLIENTS:
            shutil.copy(own, folder / "server" / "clients" / f"{name}.key")
    return folder


@pytest.fixture(scope="module")
def endpoint() -> str:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(scope="module")
def runtime(keys: Path, endpoint: str) -> Iterator[Runtime]:
    """A runtime that listens on TCP too, with a stub model that saves every prompt."""
    config = {
        "runtime": {"tcp": endpoint, "curve": str(keys / "server")},
        "tiers": {"ram": {"quota_bytes": "64MiB"}, "ram_file": {"enabled": False}, "disk": {"enabled": False}},
        "writer": {"processes": 1},
    }
    policy = {"min_tokens": 4, "cold_min_tokens": 4, "boundary_trim_tokens": 0, "boundary_align_tokens": 1}
    with Runtime(config) as made:
        with made.client() as client:
            client.load_model(
                "x", "tiny", backend="stub", policy=policy, model_opts={"step_ms": 5}, context_opts={"n_ctx": 4096, "n_seq_max": 4}
            )  # fmt: skip
        yield made


@pytest.fixture
def remote(
    runtime: Runtime, keys: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Client]]:
    """A client over TCP, with the keys of whom it is given."""
    made: list[Client] = []

    def connect(name: str) -> Client:
        monkeypatch.setenv("BARREL_CURVE", str(keys / name))
        client = Client(endpoint)
        client.models() if name in CLIENTS else None  # the keys are read when it connects
        made.append(client)
        return client

    yield connect
    for client in made:
        client.close()


def test_tenants_share_nothing(runtime: Runtime, remote: Callable[[str], Client]) -> None:
    """A tenant hits what it computed itself, and never what another did, nor what this user did."""
    with runtime.client() as local:
        assert local.complete("tiny", PROMPT, response_tokens=2).cache_hit_kind == "cold"
    alice, bob = remote("alice"), remote("bob")
    assert alice.complete("tiny", PROMPT, response_tokens=2).cache_hit_kind == "cold"
    assert bob.complete("tiny", PROMPT, response_tokens=2).cache_hit_kind == "cold"
    assert alice.complete("tiny", PROMPT, response_tokens=2).cache_hit_kind == "exact"


def test_cancel_is_bounded(remote: Callable[[str], Client]) -> None:
    """A tenant cannot cancel another's request, even if it knows its id."""
    alice, bob = remote("alice"), remote("bob")
    with alice.stream("tiny", PROMPT, response_tokens=40) as stream:
        next(stream)
        bob.cancel(stream.request_id)
        bob.models()  # the cancel has been looked at
        assert stream.result().finish_reason == "length"


def test_what_is_for_this_user_only(remote: Callable[[str], Client]) -> None:
    """A tenant may use models and look at them; the rest is refused."""
    alice = remote("alice")
    assert alice.phase("tiny") == "idle"
    calls: list[Callable[[], object]] = [
        lambda: alice.unload("tiny"), lambda: alice.load_model("x", backend="stub"), alice.status, alice.processes,
        alice.cache.dump, alice.cache.gc, alice.counters, lambda: alice.restart("index"), alice.recent_requests,
        lambda: alice.set_adapters("tiny", []),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(NotSupported):
            call()


def test_strangers_stay_out(remote: Callable[[str], Client], endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown key, and no key at all, get no answer."""
    with pytest.raises(NoRuntime, match="does not know this client's key"):
        remote("stranger").models()
    monkeypatch.delenv("BARREL_CURVE")
    with Client(endpoint) as client, pytest.raises(InvalidArgument, match="BARREL_CURVE"):
        client.models()
    plain = PlainClient(endpoint)
    plain.call("router", "greet", {})
    with pytest.raises(AssertionError, match="no answer"):
        plain.receive(timeout_ms=500)
    plain.close()


def test_death_of_the_router_is_a_pause(runtime: Runtime, remote: Callable[[str], Client]) -> None:
    """A stream over TCP goes on where it was when the router comes back, and a client that is new then waits for it."""
    alice = remote("alice")
    quiet = alice.complete("tiny", PROMPT, response_tokens=40).generated
    with alice.stream("tiny", PROMPT, response_tokens=40) as stream:
        next(stream)
        os.kill(runtime.processes()["router"], signal.SIGKILL)
        assert remote("bob").phase("tiny") in ("generating", "idle")
        result = stream.result()
    assert (result.generated, result.finish_reason, result.resubmitted) == (quiet, "length", 1)


def test_local_clients_are_as_before(runtime: Runtime) -> None:
    """The Unix socket asks for no key, and who comes through it may do everything."""
    with runtime.client() as local:
        assert local.status()["models"]
        assert local.complete("tiny", PROMPT, response_tokens=2).cache_hit_kind == "exact"


def test_missing_keys_end_the_start(tmp_path: Path, endpoint: str) -> None:
    """A runtime that is to listen on TCP and has no keys does not start, and says which file is missing."""
    with pytest.raises(BarrelError, match=r"server\.key_secret"):
        Runtime({"runtime": {"tcp": endpoint, "curve": str(tmp_path)}})


def test_a_reload_takes_up_the_list_of_clients(
    runtime: Runtime, keys: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is added comes in after a reload, and one that is removed comes in no more."""
    monkeypatch.setenv("BARREL_CURVE", str(keys / "late"))
    (keys / "late").mkdir()
    shutil.copy(keys / "server" / "server.key", keys / "late" / "server.key")
    own, _ = zmq.auth.create_certificates(keys / "late", "client")
    listed = keys / "server" / "clients" / "late.key"
    directory = Path(runtime.endpoint.removeprefix("ipc://")).parent
    shutil.copy(own, listed)
    ask_supervisor(directory, Reload(), Reloaded)
    with runtime.client() as client:
        client.models()  # the router has read what came before it
    with Client(endpoint, retry=False) as late:
        assert [row.model_id for row in late.models()] == ["tiny"]
    listed.unlink()
    ask_supervisor(directory, Reload(), Reloaded)
    with runtime.client() as client:
        client.models()
    with Client(endpoint, retry=False) as late, pytest.raises(NoRuntime):
        late.models()
