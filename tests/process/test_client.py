"""The clients against a real runtime: streams through deaths, cancels, deadlines, many threads, and no runtime at all."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from barrel_inference import (
    AlreadyLoaded,
    AsyncClient,
    BarrelError,
    Client,
    DeadlineExceeded,
    ModelDown,
    ModelFailed,
    NoRuntime,
    NoSession,
    Runtime,
    StreamEvent,
)
from barrel_inference.runtime import read_settings, start_daemon, stop_daemon
from tests.process.killing import wait_for

DEADLINE_S = 30
CONFIG = {
    "tiers": {"ram": {"quota_bytes": "64MiB"}, "ram_file": {"enabled": False}, "disk": {"enabled": False}},
    "writer": {"processes": 1},
    "supervisor": {"intensity": 100, "model_intensity": 100, "backoff_max_s": 0.05},
}
PROMPT = "1 2 3 4 5 6 7"
TOKENS = 120


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    """One tree for the module, with a slow stub model `slow` of several sequences."""
    with Runtime(CONFIG) as made:
        with made.client() as client:
            client.load_model(
                "slow", "slow", backend="stub", model_opts={"step_ms": 5}, context_opts={"n_ctx": 4096, "n_seq_max": 4}
            )
        yield made


@pytest.fixture
def client(runtime: Runtime) -> Iterator[Client]:
    """A client that retries."""
    with runtime.client() as made:
        yield made


def kill(client: Client, process: str) -> None:
    """SIGKILL one process of the runtime."""
    os.kill(client.processes()[process], signal.SIGKILL)


@pytest.mark.parametrize("victim", ["model:slow", "router", "index", "tier:ram"])
def test_stream_survives_a_death(client: Client, victim: str) -> None:
    """Whoever dies in the middle of a stream: the reader sees a pause, and the text has no gap and no repeat."""
    want = client.complete("slow", PROMPT, response_tokens=TOKENS, seed=7)
    events: list[StreamEvent] = []
    with client.stream("slow", PROMPT, response_tokens=TOKENS, seed=7) as stream:
        for event in stream:
            events.append(event)
            if len(events) == 5:
                kill(client, victim)
    result = events[-1].result
    assert result is not None
    assert "".join(event.text for event in events) == result.reply == want.reply
    assert [token for event in events for token in event.token_ids] == result.generated == want.generated
    assert result.request_id == stream.request_id
    assert result.resubmitted == (1 if victim in ("model:slow", "router") else 0)


@pytest.mark.parametrize(("victim", "error"), [("model:slow", ModelDown), ("router", NoRuntime)])
def test_retry_off(runtime: Runtime, client: Client, victim: str, error: type[BarrelError]) -> None:
    """Without retry a death is one typed, retryable error."""
    wait_for(lambda: client.phase("slow") == "idle")
    with runtime.client(retry=False) as impatient, impatient.stream("slow", PROMPT, response_tokens=2000) as stream:
        next(stream)
        kill(client, victim)
        with pytest.raises(error) as caught:
            list(stream)
    assert caught.value.retryable


def test_calls_survive_a_death(client: Client) -> None:
    """Calls that may be made twice are, when the process is back."""
    ids = client.tokenize("slow", PROMPT)
    for victim in ("model:slow", "router", "index"):
        kill(client, victim)
        assert client.tokenize("slow", PROMPT) == ids
        assert client.counters()["messages_rejected"] == 0


def test_deadly_request(client: Client) -> None:
    """A request that kills its model each time gets model_down, not retryable, after three attempts; the model serves on."""
    token = client.tokenize("slow", "666")[0]
    client.load_model("deadly", "deadly", backend="stub", model_opts={"crash_on_token": token})
    with pytest.raises(ModelFailed) as caught:
        client.complete("deadly", [1, 2, token], response_tokens=2)
    assert not caught.value.retryable
    assert "3 times" in str(caught.value)
    assert client.complete("deadly", [1, 2], response_tokens=2).completion_tokens == 2
    client.unload("deadly")


def test_continuation_survives_if_it_can(client: Client) -> None:
    """A continuation whose model died goes on if the caller said what it continues; else it is no_session."""
    first = client.complete("slow", PROMPT, session_id="s", response_tokens=3, seed=1)
    with client.stream_continue(
        "slow", "8 9", session_id="s", expect_committed=first.context_tokens, response_tokens=60, seed=1
    ) as stream:
        next(stream)
        kill(client, "model:slow")
        result = stream.result()
    assert result.context_tokens[: len(first.context_tokens)] == first.context_tokens
    assert result.resubmitted == 1
    with client.stream_continue("slow", "8 9", session_id="s", response_tokens=1000) as stream:
        next(stream)
        kill(client, "model:slow")
        with pytest.raises(NoSession):
            list(stream)


def test_cancel(client: Client) -> None:
    """A cancelled stream goes on to `done` with reason cancelled; cancelling twice, or nothing, is fine."""
    with client.stream("slow", PROMPT, response_tokens=2000) as stream:
        next(stream)
        stream.cancel()
        result = stream.result()
    assert (result.finish_reason, result.cancelled) == ("cancelled", True)
    client.cancel(stream.request_id)
    client.cancel("never-was")
    assert client.complete("slow", PROMPT, response_tokens=1).finish_reason == "length"


def test_cancel_by_another_client(runtime: Runtime, client: Client) -> None:
    """A request id is enough to cancel, from anywhere."""
    with runtime.client() as other, client.stream("slow", PROMPT, response_tokens=2000) as stream:
        next(stream)
        other.cancel(stream.request_id)
        assert stream.result().cancelled


def test_left_early(client: Client) -> None:
    """A stream that is left, or dropped unread, is cancelled in the runtime."""
    with client.stream("slow", PROMPT, response_tokens=4000) as stream:
        next(stream)
    dropped = client.stream("slow", PROMPT, response_tokens=4000)
    next(dropped)
    del dropped
    wait_for(lambda: client.queue_depth("slow") == 0)


def test_closed_client(runtime: Runtime, client: Client) -> None:
    """Closing a client ends its requests; using it afterwards is no_runtime."""
    closing = runtime.client()
    stream = closing.stream("slow", PROMPT, response_tokens=4000)
    next(stream)
    closing.close()
    wait_for(lambda: client.queue_depth("slow") == 0)
    with pytest.raises(NoRuntime):
        closing.models()
    with pytest.raises(NoRuntime):  # a text that is cut off does not look like one that has ended
        list(stream)
    stream.close()


def test_two_threads_may_read_one_stream(client: Client) -> None:
    """Each event goes to one of them, and both see the end."""
    stream = client.stream("slow", PROMPT, response_tokens=TOKENS, event_interval_ms=0)
    with ThreadPoolExecutor(2) as pool:
        shares = list(pool.map(lambda _number: list(stream), range(2)))
    assert sum(len(event.token_ids) for share in shares for event in share) == TOKENS
    assert sum(event.result is not None for share in shares for event in share) == 1


def test_paused_reader_loses_nothing(client: Client) -> None:
    """A reader that does not read holds up its own stream only, and then gets everything, in few events."""
    with client.stream("slow", PROMPT, response_tokens=150, seed=3) as stream:
        next(stream)
        wait_for(lambda: client.phase("slow") == "idle")  # all of it is generated
        rest = list(stream)
    result = rest[-1].result
    assert result is not None
    assert sum(len(event.token_ids) for event in rest) == result.completion_tokens - 1
    assert len(rest) < 100


def test_deadline(client: Client) -> None:
    """A deadline ends a request with timeout, in the runtime too."""
    with pytest.raises(DeadlineExceeded):
        client.complete("slow", PROMPT, response_tokens=4000, deadline_s=0.3)
    wait_for(lambda: client.queue_depth("slow") == 0)


def test_many_threads(client: Client) -> None:
    """One client serves many threads at once, also while a stream of its own is open."""
    with client.stream("slow", PROMPT, response_tokens=300) as stream, ThreadPoolExecutor(8) as pool:
        next(stream)
        found = list(pool.map(lambda number: client.complete("slow", [1, number], response_tokens=3), range(16)))
        assert client.phase("slow") in ("generating", "prefilling")
        stream.cancel()
    assert [result.completion_tokens for result in found] == [3] * 16


def test_async_client(runtime: Runtime, client: Client) -> None:
    """The asyncio client does the same: streams, parallel requests, and a task's cancel that ends the request."""

    async def use() -> None:
        async with AsyncClient(runtime.endpoint) as asking:
            async with asking.stream("slow", PROMPT, response_tokens=5) as stream:
                kinds = [event.kind async for event in stream]
            assert kinds == ["token"] * (len(kinds) - 1) + ["done"]
            results = await asyncio.gather(*(asking.complete("slow", [1, n], response_tokens=2) for n in range(8)))
            assert [result.completion_tokens for result in results] == [2] * 8
            task = asyncio.create_task(asking.complete("slow", PROMPT, response_tokens=4000))
            await asyncio.to_thread(wait_for, lambda: client.queue_depth("slow") == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_for, lambda: client.queue_depth("slow") == 0)

    asyncio.run(asyncio.wait_for(use(), DEADLINE_S))


def test_load_progress_and_ids(client: Client) -> None:
    """A load tells its progress to the waiting thread, which may use the client to say so; ids are free after unload."""
    seen: list[float] = []

    def on_progress(fraction: float) -> None:
        client.models()
        seen.append(fraction)

    for _ in range(2):
        client.load_model("x", "again", backend="stub", model_opts={"load_ms": 100}, on_progress=on_progress)
        with pytest.raises(AlreadyLoaded):
            client.load_model("x", "again", backend="stub")
        client.unload("again")
    assert seen == sorted(seen[: len(seen) // 2]) * 2 or seen[-1] == 1.0
    assert client.load_model("x", backend="stub").startswith("barrel_inference_model_")


def test_load_survives_the_router(client: Client) -> None:
    """A load goes on when the router dies: the caller waits, and has its model."""
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(client.load_model, "x", "late", backend="stub", model_opts={"load_ms": 1000})
        wait_for(lambda: "late" in [info.model_id for info in client.models()])
        kill(client, "router")
        assert loading.result(DEADLINE_S) == "late"
    assert client.phase("late") == "idle"
    client.unload("late")


def test_restart_that_comes_to_nothing(client: Client, tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    """A model whose file is gone when it restarts is failed, with the reason; it can be loaded again under its id."""
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_models["dense"], path)
    client.load_model(path, "lost", context_opts={"n_ctx": 256, "n_threads": 1})
    path.unlink()
    kill(client, "model:lost")
    wait_for(lambda: client.phase("lost") == "failed")
    assert "model.gguf" in str(client.model_info("lost").reason)
    with pytest.raises(ModelFailed):
        client.complete("lost", "hello", response_tokens=1)
    shutil.copy(tiny_models["dense"], path)
    client.load_model(path, "lost", context_opts={"n_ctx": 256, "n_threads": 1})
    assert client.complete("lost", "hello", response_tokens=1).completion_tokens <= 1
    client.unload("lost")


def test_interrupt_cancels_in_the_runtime(runtime: Runtime, client: Client) -> None:
    """Ctrl-C during `complete` raises KeyboardInterrupt, and the request ends in the runtime too."""
    code = (
        "import sys; from barrel_inference import Client\n"
        "try:\n    Client(sys.argv[1]).complete('slow', '1 2 3', response_tokens=4000)\n"
        "except KeyboardInterrupt:\n    sys.exit(130)"
    )
    # -u and no shell: a shell would start it with SIGINT ignored.
    program = subprocess.Popen([sys.executable, "-P", "-u", "-c", code, runtime.endpoint])
    wait_for(lambda: client.queue_depth("slow") == 1)
    program.send_signal(signal.SIGINT)
    assert program.wait(DEADLINE_S) == 130
    wait_for(lambda: client.queue_depth("slow") == 0)


def test_no_runtime(tmp_path: Path) -> None:
    """Without a runtime every call is no_runtime at once, with what to do."""
    began_s = time.monotonic()
    with Client(str(tmp_path / "router")) as client:
        for call in (client.models, client.status, lambda: client.complete("tiny", "hi")):
            with pytest.raises(NoRuntime, match="barrelctl start"):
                call()
    assert time.monotonic() - began_s < DEADLINE_S


def test_killed_supervisor_then_another(tmp_path: Path) -> None:
    """When the supervisor is killed, what is under way is no_runtime; the same client finds the next runtime there."""
    folder = Path(tempfile.mkdtemp(prefix="bt-", dir="/tmp"))  # short enough for sockets
    settings = read_settings({**CONFIG, "runtime": {"dir": str(folder), "state_dir": str(tmp_path)}})
    start_daemon(settings)
    with Client(str(folder / "router")) as client:
        client.load_model("x", "tiny", backend="stub", model_opts={"step_ms": 5}, context_opts={"n_ctx": 4096})
        with client.stream("tiny", PROMPT, response_tokens=4000) as stream:
            next(stream)
            kill(client, "supervisor")
            with pytest.raises(NoRuntime):
                list(stream)
        with pytest.raises(NoRuntime):
            client.models()
        start_daemon(settings)
        assert client.models() == []
    stop_daemon(folder)
    shutil.rmtree(folder, ignore_errors=True)
