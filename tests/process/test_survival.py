"""Deaths, hangs and full disks while requests run: what the callers see (whole runtimes, stub and tiny real models)."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from barrel_inference import BarrelError, Client, ModelDown, NoRuntime, NoSession, Runtime
from barrel_inference.errors import ModelFailed
from tests.process.killing import POLICY, Seen, came_back, end_of, kill, read, same, stopped, wait_for
from tests.process.tier_harness import small_file_system

SMALL: dict[str, Any] = {
    "tiers": {"ram": {"quota_bytes": "64MiB"}, "ram_file": {"quota_bytes": "64MiB"}, "disk": {"quota_bytes": "64MiB"}},
    "writer": {"processes": 2, "staging_bytes": "8MiB"},
    # These tests kill more in a minute than a runtime that is to be trusted would survive.
    "supervisor": {"intensity": 1000, "model_intensity": 1000, "backoff_max_s": 0.2},
}  # fmt: skip
PROMPT = list(range(1, 61))
HELPERS = ("index", "tier:ram", "tier:ram_file", "tier:disk", "writer:0", "writer:1")
TOKENS = 40
HANG_S = 3.0  # the least that the configuration takes


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    """One tree for the module; each test loads models of its own."""
    with Runtime(SMALL) as made:
        yield made


@pytest.fixture(scope="module")
def client(runtime: Runtime) -> Iterator[Client]:
    """A client of it."""
    with runtime.client() as made:
        yield made


_NUMBER = iter(range(10_000))


def stub(client: Client, *, tier: str = "ram", context: Mapping[str, Any] | None = None, **opts: Any) -> str:
    """A fresh stub model in a namespace of its own, slow enough to be killed in the middle."""
    return client.load_model(
        f"stub-{next(_NUMBER)}", backend="stub", tier=tier, policy=POLICY, model_opts={"step_ms": 2, **opts},
        context_opts={"n_ctx": 4096, "n_batch": 64, **(context or {})},
        thinking_markers=["<think>", "</think>"] if "thinking_tokens" in opts else None,
    )  # fmt: skip


def tiny(client: Client, path: Path, **context: Any) -> str:
    """A fresh tiny real model that answers every prompt as if it were alone, in a namespace of its own."""
    return client.load_model(
        path, policy=POLICY, fingerprint=next(_NUMBER).to_bytes(32, "big"), fingerprint_mode="fast_unsafe",
        context_opts={"n_ctx": 1024, "n_batch": 128, "n_threads": 1, "deterministic": True, **context},
    )  # fmt: skip


def disturbed(client: Client, model: str, disturb: Callable[[], object], *, after: int = 5, **options: Any) -> Seen:
    """What the reader of a stream sees that is disturbed; the same request undisturbed has to look the same."""
    options = {"response_tokens": TOKENS, "event_interval_ms": 0} | options
    prompt = options.pop("prompt", PROMPT)
    with client.stream(model, prompt, **options) as stream:
        seen = read(stream, disturb, after=after)
    with client.stream(model, prompt, **options) as stream:
        assert same(seen, read(stream))
    return seen


# --- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 17, TOKENS - 10])
@pytest.mark.parametrize("victim", ["model", "router"])
def test_death_of_model_or_router_is_a_pause(runtime: Runtime, client: Client, victim: str, after: int) -> None:
    """SIGKILL early, in the middle and near the end: the whole text, no gap, no repeat, and the result says so."""
    model = stub(client)
    target = f"model:{model}" if victim == "model" else victim
    assert disturbed(client, model, lambda: kill(runtime, target), after=after).end.resubmitted == 1
    client.unload(model)


@pytest.mark.parametrize("tier", ["ram", "ram_file", "disk"])
@pytest.mark.parametrize("victim", HELPERS)
def test_death_of_a_helper_is_not_noticed(runtime: Runtime, client: Client, victim: str, tier: str) -> None:
    """SIGKILL of the index, a tier or a writer while a request runs and saves: the same text, and the helper is back."""
    model = stub(client, tier=tier)
    old = runtime.processes()[victim]
    assert disturbed(client, model, lambda: kill(runtime, victim)).end.resubmitted == 0
    came_back(runtime, victim, old)
    client.unload(model)


@pytest.mark.parametrize("victim", ["model", "router"])
def test_cancel_across_a_death(runtime: Runtime, client: Client, victim: str) -> None:
    """Whoever is to cancel a request may die of it: the caller gets its cancelled result, with what was delivered."""
    model = stub(client)
    target = f"model:{model}" if victim == "model" else victim
    with client.stream(model, PROMPT, response_tokens=3000) as stream:

        def kill_and_cancel() -> None:
            with stopped(runtime.processes()[target]):  # so that it cannot obey before it dies
                stream.cancel()
                kill(runtime, target)

        seen = read(stream, kill_and_cancel)
    assert seen.end.finish_reason == "cancelled"
    assert seen.end.reply_bytes == seen.text
    assert 5 <= len(seen.ids) < 3000
    client.unload(model)


@pytest.mark.parametrize("seed", [None, 7])
def test_sampling_goes_on_with_its_seed(runtime: Runtime, client: Client, seed: int | None) -> None:
    """A sampled reply, whether its seed was given or drawn, goes on as it would have."""
    model = stub(client)
    options: dict[str, Any] = {"temperature": 0.8, "response_tokens": TOKENS}
    with client.stream(model, PROMPT, seed=seed, **options) as stream:
        seen = read(stream, lambda: kill(runtime, f"model:{model}"))
    assert seen.end.resubmitted == 1
    with client.stream(model, PROMPT, seed=seen.end.seed, **options) as stream:
        assert same(seen, read(stream))
    client.unload(model)


def test_stop_sequence_across_a_death(runtime: Runtime, client: Client) -> None:
    """A stop sequence that begins before the death and ends after it is found."""
    model = stub(client)
    options: dict[str, Any] = {"temperature": 0.8, "seed": 3}
    whole = client.complete(model, PROMPT, response_tokens=TOKENS, **options)
    words = whole.reply.split(" ")
    stop = " ".join(words[4:8])  # ends with the eighth token; its first is the fifth
    seen = disturbed(
        client, model, lambda: kill(runtime, f"model:{model}"), after=4, stop_sequences=[stop], **options
    )  # fmt: skip
    assert (seen.end.finish_reason, seen.end.stop_sequence) == ("stop", stop)
    client.unload(model)


@pytest.mark.parametrize("budget", [None, 4])
@pytest.mark.parametrize("after", [2, 6, 8])
def test_thinking_spans_across_a_death(runtime: Runtime, client: Client, after: int, budget: int | None) -> None:
    """Before, at and after the end of its thinking: each span is closed once, by its marker or by its budget."""
    model = stub(client, thinking_tokens=6)
    seen = disturbed(
        client,
        model,
        lambda: kill(runtime, f"model:{model}"),
        after=after,
        thinking=True,
        thinking_budget_tokens=budget,
    )
    assert seen.kinds == ["thinking", "thinking_end", "token", "done"]
    client.unload(model)


@pytest.mark.parametrize("kind", ["dense", "window", "mamba"])
def test_real_models(runtime: Runtime, client: Client, tiny_models: Mapping[str, Path], kind: str) -> None:
    """A real model's greedy text over its death, and over the router's, equals the undisturbed one."""
    if kind not in tiny_models:
        kind = next(name for name in tiny_models if name not in ("dense", "window"))
    model = tiny(client, tiny_models[kind])
    prompt = "the cat sat on the mat and another thing sat there too. " * 3
    for target in (f"model:{model}", "router"):
        seen = disturbed(client, model, lambda target=target: kill(runtime, target), prompt=prompt, response_tokens=800)  # type: ignore[misc]
        assert seen.end.resubmitted == 1
    client.unload(model)


def test_stored_logits_across_a_death(runtime: Runtime, client: Client, tiny_models: Mapping[str, Path]) -> None:
    """A reply that began with stored logits goes on after a death as it would have, drawn or greedy."""
    model = client.load_model(
        tiny_models["dense"], policy=POLICY | {"store_logits": True}, context_opts={"n_ctx": 1024, "n_threads": 1}
    )
    prompt = "the cat sat on the mat and a third thing sat there too. " * 3
    assert client.prefill_only(model, prompt).finish_key
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 7}
    for options in ({}, drawn):
        seen = disturbed(
            client, model, lambda: kill(runtime, f"model:{model}"), prompt=prompt, response_tokens=400, **options
        )
        assert seen.end.resubmitted == 1
    assert client.complete(model, prompt, response_tokens=1).cache_hit_kind == "exact"
    client.unload(model)


def test_grammar_across_a_death(runtime: Runtime, client: Client, tiny_models: Mapping[str, Path]) -> None:
    """A grammar goes on from where the delivered tokens left it."""
    model = tiny(client, tiny_models["dense"])
    grammar = 'root ::= "[" [0-9]{40} "]" " and nothing more"'
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 11}
    for options in ({}, drawn):
        seen = disturbed(
            client, model, lambda: kill(runtime, f"model:{model}"), prompt="the cat", grammar=grammar, response_tokens=200,
            **options,
        )  # fmt: skip
        assert seen.end.finish_reason == "stop"
        assert seen.text.endswith(b"] and nothing more")
    client.unload(model)


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_a_session_is_started_anew(runtime: Runtime, client: Client) -> None:
    """A turn whose model dies is answered, and its session lives on in the new process."""
    model = stub(client, context={"n_seq_max": 2})
    first = client.complete(model, PROMPT, session_id="s", response_tokens=5)
    with client.stream(model, [*first.context_tokens, 7], session_id="s", response_tokens=TOKENS) as stream:
        seen = read(stream, lambda: kill(runtime, f"model:{model}"))
    assert seen.end.resubmitted == 1
    assert client.complete(model, [*first.context_tokens, 7], response_tokens=TOKENS).generated == seen.ids
    more = client.continue_(model, [8], session_id="s", response_tokens=2)
    assert more.prompt_tokens == len(seen.end.context_tokens) + 1
    client.unload(model)


@pytest.mark.parametrize("victim", ["model", "router"])
def test_a_checked_continuation_survives(runtime: Runtime, client: Client, victim: str) -> None:
    """With `expect_committed` a continuation goes on over a death; without it, the caller learns that the session is lost."""
    model = stub(client, context={"n_seq_max": 2})
    target = f"model:{model}" if victim == "model" else victim
    held = client.complete(model, PROMPT, session_id="s", response_tokens=5).context_tokens
    with client.stream_continue(model, "7 8", session_id="s", expect_committed=held, response_tokens=TOKENS) as stream:
        seen = read(stream, lambda: kill(runtime, target))
    assert seen.end.resubmitted == 1
    assert client.complete(model, [*held, 7, 8], response_tokens=TOKENS).generated == seen.ids
    with client.stream_continue(model, [9], session_id="s", response_tokens=TOKENS) as stream, pytest.raises(NoSession):
        read(stream, lambda: kill(runtime, target))
    client.unload(model)


# --- retry off, poison ------------------------------------------------------------------------------------------------


def test_without_retry_one_typed_error(runtime: Runtime) -> None:
    """`retry=False`: the death of the model is `model_down`, of the router `no_runtime`, both retryable, and both come once."""
    with runtime.client(retry=False) as plain, runtime.client() as other:
        model = stub(other)
        for target, error in ((f"model:{model}", ModelDown), ("router", NoRuntime)):
            with plain.stream(model, PROMPT, response_tokens=TOKENS) as stream:
                with pytest.raises(error) as caught:
                    read(stream, lambda target=target: kill(runtime, target))  # type: ignore[misc]
                assert caught.value.retryable
                assert list(stream) == []
            assert other.complete(model, PROMPT, response_tokens=1).completion_tokens == 1
        other.unload(model)


@pytest.mark.parametrize("where", ["prompt", "reply"])
def test_a_deadly_request_fails_alone(client: Client, where: str) -> None:
    """A request that kills its model three times gets `model_down`; those beside and behind it get their whole replies."""
    deadly_reply = client.complete(probe := stub(client), [*PROMPT, 5], response_tokens=1).generated[0]
    client.unload(probe)
    deadly, token = ([*PROMPT, 666, 5], 666) if where == "prompt" else ([*PROMPT, 5], deadly_reply)
    model = stub(client, context={"n_seq_max": 3}, crash_on_token=token)
    solo = stub(client)
    good = [[n, *PROMPT] for n in range(100, 108)]
    with ThreadPoolExecutor(9) as pool:
        others = [pool.submit(client.complete, model, prompt, response_tokens=TOKENS) for prompt in good]
        bad = pool.submit(client.complete, model, deadly, response_tokens=TOKENS)
        with pytest.raises(ModelFailed, match="3 times") as caught:
            bad.result()
        assert (caught.value.code, caught.value.retryable) == ("model_down", False)
        for prompt, other in zip(good, others, strict=True):
            assert other.result().generated == client.complete(solo, prompt, response_tokens=TOKENS).generated
    assert client.complete(model, PROMPT, response_tokens=1).completion_tokens == 1
    client.unload(model)
    client.unload(solo)


def test_a_model_that_dies_again_and_again_fails_alone() -> None:
    """Over its restart limit a model is `failed` with its reason, its callers are told for good, and the others serve."""
    with (
        Runtime(SMALL | {"supervisor": {"model_intensity": 1, "backoff_max_s": 0.1}}) as runtime,
        runtime.client() as client,
    ):
        model, other = stub(client), stub(client)
        for _ in range(2):
            pid = kill(runtime, f"model:{model}")
            wait_for(
                lambda pid=pid: client.model_info(model).phase == "failed"  # type: ignore[misc]
                or runtime.processes().get(f"model:{model}", pid) != pid,
                "it is back, or failed",
            )  # fmt: skip
        wait_for(lambda: client.model_info(model).phase == "failed", "it is failed")
        with pytest.raises(ModelFailed) as caught:
            client.complete(model, PROMPT)
        assert not caught.value.retryable
        assert client.complete(other, PROMPT, response_tokens=1).completion_tokens == 1


# --- hangs and stops --------------------------------------------------------------------------------------------------


def test_a_hung_model_is_replaced(client: Client) -> None:
    """A decode call that never ends: the model is replaced, the request that hung it is given up, others are answered."""
    model = stub(client, context={"decode_budget_ms": 100}, hang_on_token=666)
    with ThreadPoolExecutor(1) as pool:
        hung = pool.submit(client.complete, model, [*PROMPT, 666, 1], deadline_s=15.0)
        wait_for(lambda: client.model_info(model).restarts, "the model was replaced")
        with pytest.raises(BarrelError) as caught:
            hung.result()
    assert caught.value.code in ("timeout", "model_down")
    client.unload(model)


@pytest.fixture(scope="module")
def impatient() -> Iterator[Runtime]:
    """One that takes silence for a hang as soon as it may."""
    with Runtime(SMALL | {"supervisor": {"hang_s": HANG_S, "intensity": 100}}) as made:
        yield made


@pytest.mark.parametrize("victim", ["index", "router"])
def test_a_hung_helper_is_replaced(impatient: Runtime, victim: str) -> None:
    """A stopped index costs hits, not answers, until it is replaced; a stopped router is a pause."""
    with impatient.client() as client:
        model = stub(client)
        whole = client.complete(model, PROMPT, response_tokens=TOKENS).generated
        pid = impatient.processes()[victim]
        with stopped(pid):
            assert client.complete(model, PROMPT, response_tokens=TOKENS).generated == whole
            came_back(impatient, victim, pid)


def test_everything_stands_still(impatient: Runtime) -> None:
    """Stopped as a whole for longer than a hang may take, as a suspended machine is: a pause, and nobody is replaced."""
    with impatient.client() as client:
        model = stub(client, context={"decode_budget_ms": 500})
        pids = impatient.processes()

        def stand_still() -> None:
            with contextlib.ExitStack() as stack:
                for pid in reversed(pids.values()):  # so that the supervisor goes on first, and finds nobody alive
                    stack.enter_context(stopped(pid))
                threading.Event().wait(HANG_S + 1.0)

        assert disturbed(client, model, stand_still).end.resubmitted == 0
        assert impatient.processes() == pids


@pytest.mark.parametrize("victim", ["index", "tier:ram", "router", "model"])
def test_a_short_stop_is_a_pause(runtime: Runtime, client: Client, victim: str) -> None:
    """SIGSTOP and, a moment later, SIGCONT: nobody is replaced, nothing is lost."""
    model = stub(client)
    pids = runtime.processes()
    pid = pids[f"model:{model}" if victim == "model" else victim]

    def halt() -> None:
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()

    assert disturbed(client, model, halt).end.resubmitted == 0
    assert runtime.processes() == pids
    client.unload(model)


# --- the supervisor ---------------------------------------------------------------------------------------------------


def test_killed_supervisor(tmp_path: Path) -> None:
    """SIGKILL of the supervisor: all children are gone within 2 s, the caller gets `no_runtime`; the next start has the rows."""
    with Runtime(SMALL, state_dir=tmp_path) as runtime, runtime.client() as client:
        model = client.load_model("kept", "kept", backend="stub", tier="disk", policy=POLICY, model_opts={"step_ms": 5})
        done = client.complete(model, PROMPT, response_tokens=4)
        wait_for(lambda: client.counters()["bytes_disk"] > 0, "the row is stored")
        wait_for(lambda: not [r for r in client.cache.dump() if r.status == "writing"], "all is written")
        pids = list(runtime.processes().values())
        with client.stream(model, [*PROMPT, 9], response_tokens=2000) as stream, pytest.raises(NoRuntime):
            read(stream, lambda: kill(runtime, "supervisor"))
        assert all(end_of(pid, 2.0) for pid in pids)
    with Runtime(SMALL, state_dir=tmp_path) as runtime, runtime.client() as client:
        client.load_model("kept", "kept", backend="stub", tier="disk", policy=POLICY)
        again = client.complete("kept", PROMPT, response_tokens=4)
        assert (again.cache_hit_kind, again.hit_source, again.generated) == ("exact", "disk", done.generated)


@pytest.mark.parametrize("how", ["unload", "stop", "sigterm"])
@pytest.mark.parametrize("reader", ["reads", "sleeps"])
def test_stop_while_streaming(tmp_path: Path, how: str, reader: str) -> None:
    """Unload, stop and SIGTERM end every stream, and what the sequences held is found by the next runtime."""
    with Runtime(SMALL, state_dir=tmp_path) as runtime:
        client = runtime.client()
        model = client.load_model(
            "m", "m", backend="stub", tier="disk", policy=POLICY, model_opts={"step_ms": 2},
            context_opts={"n_ctx": 8192, "n_seq_max": 2},
        )  # fmt: skip
        streams = [client.stream(model, [n, *PROMPT], response_tokens=4000) for n in (1, 2)]
        for stream in streams:
            next(stream)
        if reader == "sleeps":  # until there is no credit left, and text waits in the model
            wait_for(lambda: client.model_info(model).phase == "generating", "both run")
            threading.Event().wait(0.3)
        with ThreadPoolExecutor(2) as pool:
            ends = [pool.submit(list, stream) for stream in streams] if reader == "reads" else []
            if how == "unload":
                client.unload(model)
            elif how == "stop":
                with runtime.client() as other:
                    other.processes()
                supervisor = runtime.processes()["supervisor"]
                os.kill(supervisor, signal.SIGTERM)
                assert end_of(supervisor)
            else:
                pid = runtime.processes()[f"model:{model}"]
                os.kill(pid, signal.SIGTERM)
                assert end_of(pid)
            ends = ends or [pool.submit(list, stream) for stream in streams]
            results = [end.result()[-1].result for end in ends]
        assert all(result is not None and result.finish_reason == "cancelled" for result in results)
        contexts = [result.context_tokens for result in results if result is not None]
    with Runtime(SMALL, state_dir=tmp_path) as runtime, runtime.client() as client:
        client.load_model(
            "m", "m", backend="stub", tier="disk", policy=POLICY, context_opts={"n_ctx": 8192, "n_seq_max": 2}
        )
        # On a busy machine the first lookup may come before the tier has told the index all its rows, and is a miss then.
        wait_for(lambda: client.cache.dump(), "the index knows the rows")
        for context in contexts:
            found = client.complete("m", [*context, 1], response_tokens=1)
            assert (found.hit_source, found.cache_delta.read) == ("disk", len(context)), found.miss_reason


# --- full and forbidden places ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["disk", "ram_file"])
def test_a_full_file_system(tmp_path: Path, tier: str) -> None:
    """A tier whose file system is full drops saves and counts them; every answer is the cold one; nothing dies."""
    with small_file_system(tmp_path) as small:
        config = SMALL | {"tiers": SMALL["tiers"] | {tier: {"quota_bytes": "64MiB", "root": str(small / "kvc")}}}
        with Runtime(config) as runtime, runtime.client() as client:
            pids = runtime.processes()
            model = stub(client, tier=tier, step_ms=0, bytes_per_token=4096)
            solo = stub(client, step_ms=0)
            for number in range(20):
                prompt = [number * 1000, *PROMPT]
                reply = client.complete(model, prompt, response_tokens=4).generated
                assert reply == client.complete(solo, prompt, response_tokens=4).generated
            stats = {one.server: one for one in client.cache.stats().tiers}[f"tier:{tier}"]
            assert stats.stored_bytes <= 1 << 20
            assert {name: pid for name, pid in runtime.processes().items() if name in pids} == pids


def test_a_full_disk_below_the_logs(tmp_path: Path) -> None:
    """Where not even a line can be logged everything goes on: requests, restarts, loads."""
    with small_file_system(tmp_path) as small:
        config = SMALL | {"runtime": {"log_dir": str(small)}}
        with Runtime(config) as runtime, runtime.client() as client:
            model = stub(client, step_ms=0)
            with contextlib.suppress(OSError), (small / "fill").open("wb", buffering=0) as fill:
                while fill.write(bytes(4096)):
                    pass
            for number in range(20):  # a line of each process is in the way of the next page
                client.complete(model, [number, *PROMPT], response_tokens=1)
            pids = runtime.processes()
            os.kill(pids.pop("router"), signal.SIGKILL)
            for name in (model, stub(client, step_ms=0)):
                assert client.complete(name, PROMPT, response_tokens=4).completion_tokens == 4
            assert {name: pid for name, pid in runtime.processes().items() if name in pids} == pids


@pytest.mark.parametrize("trouble", ["quota", "file", "missing"])
def test_a_tier_that_takes_nothing(tmp_path: Path, trouble: str) -> None:
    """A quota of nothing, a root that is no directory, a root that was removed: normal answers, dropped saves."""
    root = tmp_path / "root"
    disk: dict[str, Any] = {"quota_bytes": 0 if trouble == "quota" else "64MiB", "root": str(root)}
    if trouble == "file":
        root.write_text("here lies a file")
    with Runtime(SMALL | {"tiers": SMALL["tiers"] | {"disk": disk}}) as runtime, runtime.client() as client:
        if trouble == "missing":
            subprocess.run(["rm", "-rf", str(root)], check=True)
        other = stub(client, step_ms=0)
        whole = client.complete(other, PROMPT, response_tokens=4).generated
        model = stub(client, tier="disk", step_ms=0)
        assert client.complete(model, PROMPT, response_tokens=4).generated == whole
        assert client.complete(other, PROMPT, response_tokens=4).generated == whole


def test_a_read_only_root(tmp_path: Path) -> None:
    """A disk that was remounted read-only: hits go on, saves are dropped, nothing dies."""
    with small_file_system(tmp_path) as small:
        config = SMALL | {"tiers": SMALL["tiers"] | {"disk": {"quota_bytes": "64MiB", "root": str(small / "kvc")}}}
        with Runtime(config) as runtime, runtime.client() as client:
            model = stub(client, tier="disk", step_ms=0)
            whole = client.complete(model, PROMPT, response_tokens=4).generated
            wait_for(lambda: client.counters()["bytes_disk"] > 0, "the row is stored")
            wait_for(lambda: not [r for r in client.cache.dump() if r.status == "writing"], "all is written")
            pids = runtime.processes()
            subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
            client.complete(model, [9, *PROMPT], response_tokens=4)  # takes the only sequence
            again = client.complete(model, PROMPT, response_tokens=4)
            assert (again.generated, again.hit_source) == (whole, "disk")
            assert runtime.processes() == pids


def test_a_disk_that_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """While writes hang, whoever waits for a save waits for `evict_save_timeout_ms`: an unload, a change of adapters."""
    monkeypatch.setenv("BARREL_TEST_WRITE_DELAY_S", "600")
    config = SMALL | {"cache": {"evict_save_timeout_ms": 1000}}
    with Runtime(config) as runtime, runtime.client(timeout_s=60.0) as client:
        model = client.load_model(
            "any", backend="stub", tier="disk", policy=POLICY | {"min_tokens": 10**6}, model_opts={"step_ms": 5},
            context_opts={"n_ctx": 4096},
        )  # fmt: skip
        client.complete(model, PROMPT, response_tokens=4, session_id="s")
        began_s = time.monotonic()
        client.set_adapters(model, [("/any", 1.0)])
        assert 0.9 < time.monotonic() - began_s < 30
        with client.stream(model, PROMPT, response_tokens=4000) as stream:
            events = iter(stream)
            next(events)
            began_s = time.monotonic()
            client.unload(model)
            assert 0.9 < time.monotonic() - began_s < 30
            assert [event.result.finish_reason for event in events if event.result] == ["cancelled"]
        assert f"model:{model}" not in runtime.processes()
        assert client.load_model("any", model, backend="stub", tier="disk") == model
