"""What can be seen from outside while everything runs: logs, rates, rows of a busy model."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from barrel_inference import Client, Runtime
from barrel_inference.errors import DecodeFailed, InvalidArgument
from tests.process.killing import came_back, kill, wait_for

CONFIG = {
    "tiers": {"ram": {"quota_bytes": "64MiB"}, "ram_file": {"enabled": False}, "disk": {"enabled": False}},
    "writer": {"processes": 1},
}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    """One tree for the module."""
    with Runtime(CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def client(runtime: Runtime) -> Client:
    """A client; the model `steady` takes 5 ms a token, `stuck` an hour."""
    found = runtime.client()
    for name, step_ms in (("steady", 5), ("stuck", 3_600_000)):
        found.load_model("any", name, backend="stub", model_opts={"step_ms": step_ms}, context_opts={"n_ctx": 100_000})
    return found


def events_of(runtime: Runtime, process: str, request_id: str) -> list[dict[str, Any]]:
    """The log events of a process that name a request."""
    lines = (runtime.state_dir / "log" / f"{process}.log").read_text().splitlines()
    return [json.loads(line) for line in lines if request_id in line]


def test_a_request_can_be_followed_by_its_id(runtime: Runtime, client: Client) -> None:
    """Router and model log when a request comes and how it ends, under one id and without its text."""
    with client.stream("steady", "unspeakable words", response_tokens=2) as stream:
        prompt_tokens = stream.result().prompt_tokens
    wait_for(lambda: len(events_of(runtime, "router", stream.request_id)) == 2, "the router has logged both ends")
    assert [event["event"] for event in events_of(runtime, "router", stream.request_id)] == [
        "request.forwarded", "request.answered",
    ]  # fmt: skip
    admitted, ended = events_of(runtime, "model:steady", stream.request_id)
    assert (admitted["event"], admitted["prompt_tokens"]) == ("request.admitted", prompt_tokens)
    assert (ended["event"], ended["kind"], ended["completion_tokens"]) == ("request.ended", "cold", 2)
    assert not any("unspeakable" in path.read_text() for path in (runtime.state_dir / "log").iterdir())


def test_a_refused_request_is_logged(runtime: Runtime, client: Client) -> None:
    """A request that is refused before it is queued leaves its id and its code."""
    with client.stream("steady", [2**30]) as stream, pytest.raises(InvalidArgument):
        stream.result()
    wait_for(lambda: events_of(runtime, "model:steady", stream.request_id), "the model has logged it")
    (refused,) = events_of(runtime, "model:steady", stream.request_id)
    assert (refused["event"], refused["code"]) == ("request.refused", "invalid_argument")


def test_rate_shows_while_tokens_come(client: Client) -> None:
    """A model's row says how many tokens a second it generates while it does, and none when it rests."""
    with client.stream("steady", "go", response_tokens=90_000) as stream:
        for _ in stream:  # a reader that keeps up
            if client.model_info("steady").tokens_per_s > 0:
                break
        assert client.model_info("steady").tokens_per_s <= 200, "a step takes 5 ms"
    wait_for(lambda: client.phase("steady") == "idle", "the request was cancelled")
    assert client.model_info("steady").tokens_per_s == 0


def test_observers_do_not_wait_for_a_busy_model(runtime: Runtime, client: Client) -> None:
    """Every observer answers while the model is in the middle of a step that takes an hour, and after its death and end."""
    with client.stream("stuck", "go", response_tokens=5), client.stream("stuck", "go on", response_tokens=5):
        wait_for(lambda: client.queue_depth("stuck") == 2, "both requests have arrived")
        wait_for(lambda: client.phase("stuck") == "prefilling", "the first step is under way")
        assert client.pending_len("stuck") == 1
        assert client.last_cache_hit("stuck") is None
        row = client.model_info("stuck")
        assert (row.running, row.tokens_per_s) == (1, 0.0)
        assert {model["model_id"] for model in client.status()["models"]} == {"steady", "stuck"}
        assert client.phase("stuck") == "prefilling", "the step is still under way"
    came_back(runtime, "model:stuck", kill(runtime, "model:stuck"))
    wait_for(lambda: client.queue_depth("stuck") == 0, "nothing runs in the new process")
    client.unload("stuck")
    assert (client.phase("stuck"), client.pending_len("stuck")) == ("idle", 0)


def test_failed_requests_are_among_the_recent_ones(client: Client) -> None:
    """A request that fails in its model is listed with its code."""
    client.load_model("any", "fails", backend="stub", model_opts={"decode_failed_at": 1})
    with pytest.raises(DecodeFailed):
        client.complete("fails", "one two three")
    wait_for(lambda: client.recent_requests(1)[0]["model_id"] == "fails", "it is listed")
    row = client.recent_requests(1)[0]
    assert (row["finish_reason"], row["code"]) == ("error", "decode_failed")
