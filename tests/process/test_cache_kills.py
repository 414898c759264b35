"""SIGKILL at every stage of a publication, slow writes and full quotas: afterwards index and tiers agree, and every key is
complete or absent."""

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from barrel_inference import Client, Runtime
from barrel_inference.results import Completion
from tests.process.caching import (
    CONFIG,
    FILE_TIERS,
    T12,
    TIERS,
    ask,
    check_books,
    files_of,
    forget,
    load,
    moved,
    nothing_is_on_its_way,
    root_of,
    rows,
    saved,
)
from tests.process.killing import came_back, kill, wait_for

STAGES = ("created", "written", "synced", "checked", "linked", "unlinked", "durable", "published")
PROMPTS = [[number * 100 + token for token in range(20)] for number in range(6)]


def is_published(client: Client, key: bytes | None) -> bool:
    """Does the index have this row, complete?"""
    return any(row.key == key and row.status == "available" for row in client.cache.dump())


def tiers_have_reported(client: Client) -> None:
    """Wait until the index knows the tiers: before, a save has nowhere to go and is dropped."""
    wait_for(lambda: all(one.up for one in client.cache.stats().tiers), "the tiers report")


# --- publication ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_writers_that_die_at_a_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stage: str) -> None:
    """Every writer dies at this stage of every write: before the link the row is absent, from then on it is adopted; never
    half a row, no temporary file, no promise that stays."""
    with monkeypatch.context() as environment:
        environment.setenv("BARREL_TEST_STOP_AT", stage)
        with Runtime(CONFIG, state_dir=tmp_path) as runtime, runtime.client() as client:
            for tier in FILE_TIERS:
                model = load(client, tier=tier, name=tier, policy={"cold_min_tokens": 1000})
                result = client.prefill_only(model, T12)
                assert result.finish_key is not None
                if STAGES.index(stage) >= STAGES.index("linked"):
                    wait_for(lambda key=result.finish_key: is_published(client, key), "it is adopted")  # type: ignore[misc]
                    forget(client, model)
                    again = client.complete(model, T12, response_tokens=0)
                    assert (again.cache_hit_kind, again.hit_source) == ("exact", tier)
                nothing_is_on_its_way(client)
            check_books(client, runtime)
            if STAGES.index(stage) < STAGES.index("linked"):
                assert client.cache.dump() == []
    try:  # writers live again, and whatever was left is no obstacle
        with Runtime(CONFIG, state_dir=tmp_path) as runtime, runtime.client() as client:
            for tier in FILE_TIERS:
                model = load(client, tier=tier, name=tier)
                saved(client, client.prefill_only(model, T12))
                assert ask(client, model, T12, tokens=0).hit_source == tier
            check_books(client, runtime)
    finally:
        shutil.rmtree(root_of(runtime, "ram_file"), ignore_errors=True)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """A runtime whose writes take a while."""
    monkeypatch.setenv("BARREL_TEST_WRITE_DELAY_S", "0.3")
    with Runtime(CONFIG) as made:
        monkeypatch.delenv("BARREL_TEST_WRITE_DELAY_S")
        yield made


@pytest.mark.parametrize("tier", FILE_TIERS)
@pytest.mark.parametrize("victim", ["index", "tier", "model", "writer:0"])
def test_deaths_while_saves_are_under_way(slow: Runtime, tier: str, victim: str) -> None:
    """Kills at random moments of slow writes: the same answers, books that are right, and what was asked again is warm."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with slow.client() as client:
        model = load(client, tier=tier)
        target = {"tier": f"tier:{tier}", "model": f"model:{model}"}.get(victim, victim)
        replies = []
        for prompt in PROMPTS:
            replies.append(client.complete(model, prompt, response_tokens=4).generated)
            deadline_s = time.monotonic() + rng.random() * 0.4
            wait_for(lambda end_s=deadline_s: time.monotonic() > end_s, "a random moment")  # type: ignore[misc]
            came_back(slow, target, kill(slow, target))
        check_books(client, slow)
        for prompt, reply in zip(PROMPTS, replies, strict=True):
            forget(client, model)
            assert client.complete(model, prompt, response_tokens=4).generated == reply
        nothing_is_on_its_way(client)
        check_books(client, slow)
        for prompt, reply in zip(PROMPTS, replies, strict=True):
            forget(client, model)
            again = client.complete(model, prompt, response_tokens=4)
            assert (again.generated, again.cache_hit_kind, again.hit_source) == (reply, "exact", tier)


@pytest.mark.parametrize("victim", ["index", "tier:ram", "model"])
def test_deaths_while_saves_go_to_memory(victim: str) -> None:
    """The same with the tier in memory, whose rows die with it and with nobody else."""
    with Runtime(CONFIG) as runtime, runtime.client() as client:
        model = load(client, tier="ram", bytes_per_token=65536)
        target = f"model:{model}" if victim == "model" else victim
        replies = []
        for prompt in PROMPTS:
            replies.append(client.complete(model, prompt, response_tokens=4).generated)
            came_back(runtime, target, kill(runtime, target))
        tiers_have_reported(client)
        for prompt, reply in zip(PROMPTS, replies, strict=True):
            assert ask(client, model, prompt).generated == reply
            assert ask(client, model, prompt).cache_hit_kind == "exact"
        nothing_is_on_its_way(client)
        check_books(client, runtime)


# --- slow and full ----------------------------------------------------------------------------------------------------


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """A runtime whose writes take far longer than anything else here."""
    monkeypatch.setenv("BARREL_TEST_WRITE_DELAY_S", "2")
    with Runtime(CONFIG | {"writer": {"processes": 1, "staging_bytes": "1MiB"}}) as made:
        yield made


def test_nobody_waits_for_a_slow_disk(stalled: Runtime) -> None:
    """While the one writer is inside its first write, whole requests come and go, observers answer, and each result says
    what will be stored; what does not fit staging is dropped and counted, and leaves no row."""
    with stalled.client() as client:
        model = load(client, tier="disk", bytes_per_token=8192, context={"n_seq_max": 2})
        results: list[Completion] = []
        while client.counters()["saves_dropped"] == 0:
            results.append(client.complete(model, [len(results) + 1000, *range(10)], response_tokens=30))
            assert len(results) < 50
        assert client.counters()["bytes_disk"] == 0, "a write has ended: this machine is too slow for the claim"
        assert client.model_info(model).phase == "idle"
        assert results[0].finish_key is not None
        nothing_is_on_its_way(client)
        assert is_published(client, results[0].finish_key)
        check_books(client, stalled)


@pytest.mark.parametrize("wait_ms", [0, 20_000])
def test_a_turn_waits_for_its_parent(stalled: Runtime, wait_ms: int) -> None:
    """With `session_resume_wait_ms` the next turn waits for its parent's save and is warm; with 0 it does not wait."""
    with stalled.client() as client:
        policy = {"session_resume_wait_ms": wait_ms, "cold_min_tokens": 1000}
        model = load(client, tier="disk", policy=policy)
        parent = client.complete(model, T12, response_tokens=4)
        forget(client, model)
        before = client.counters()
        more = client.complete(model, [*parent.context_tokens, 5], parent_key=parent.finish_key, response_tokens=1)
        if wait_ms:
            assert (more.cache_hit_kind, more.hit_source, more.cache_delta.read) == ("partial", "disk", 16)
            assert moved(client, before)["hits_resume"] == 1
        else:
            assert (more.cache_hit_kind, more.cache_delta.read) == ("cold", 0)


def test_a_turn_does_not_wait_when_its_parent_is_live(stalled: Runtime) -> None:
    """While the parent's save is being written, its live cells serve the next turn, whatever `session_resume_wait_ms` is."""
    with stalled.client() as client:
        policy = {"session_resume_wait_ms": 60_000, "cold_min_tokens": 1000}
        model = load(client, tier="disk", policy=policy)
        parent = client.complete(model, T12, response_tokens=4)
        more = client.complete(model, [*parent.context_tokens, 5], parent_key=parent.finish_key, response_tokens=1)
        assert (more.cache_hit_kind, more.hit_source, more.cache_delta.read) == ("partial", "live", 16)
        assert client.counters()["bytes_disk"] == 0, "the write has ended: this machine is too slow for the claim"


@pytest.mark.parametrize("tier", TIERS)
def test_a_quota_of_three_rows(tier: str) -> None:
    """Five saves into room for three: never more than the quota, the least recently used one goes first, the rest hits."""
    one: dict[str, Any] = {"cold_min_tokens": 1000}
    with Runtime(CONFIG) as runtime, runtime.client() as client:
        model = load(client, tier=tier, policy=one, bytes_per_token=4096)
        saved(client, client.prefill_only(model, T12))
        [row] = rows(client, model)
    tiers = CONFIG["tiers"] | {tier: {"quota_bytes": row.size_bytes * 3 + row.size_bytes // 2}}
    with Runtime(CONFIG | {"tiers": tiers}) as runtime, runtime.client() as client:
        model = load(client, tier=tier, policy=one, bytes_per_token=4096)
        prompts = [[number * 100 + token for token in range(12)] for number in range(5)]
        keys = []
        for number, prompt in enumerate(prompts):
            if number == 3:  # the first one is used again: the second is the oldest now
                assert ask(client, model, prompts[0], tokens=0).cache_hit_kind == "exact"
            forget(client, model)
            keys.append(saved(client, client.prefill_only(model, prompt)).finish_key)
            [stats] = [one for one in client.cache.stats().tiers if one.server == f"tier:{tier}"]
            assert stats.stored_bytes + stats.reserved_bytes <= stats.quota_bytes
            assert stats.stored_bytes == sum(row.size_bytes for row in rows(client, model))
        assert {row.key for row in rows(client, model)} == {keys[0], keys[3], keys[4]}
        assert client.counters()["evictions"] == 2
        check_books(client, runtime)


def test_what_is_larger_than_its_quota(tmp_path: Path) -> None:
    """A row that could never fit is skipped and counted, no key is given for it, and the tier goes on with others."""
    tiers = CONFIG["tiers"] | {"ram": {"quota_bytes": "64KiB"}}
    with Runtime(CONFIG | {"tiers": tiers}) as runtime, runtime.client() as client:
        model = load(client, bytes_per_token=4096, policy={"cold_min_tokens": 1000})
        small = client.prefill_only(model, T12)
        assert small.finish_key is not None
        large = client.prefill_only(model, list(range(100, 130)))
        assert (large.finish_key, large.cache_delta.created) == (None, 0)
        assert client.counters()["saves_dropped"] == 1
        check_books(client, runtime)


# --- a restart of everything ------------------------------------------------------------------------------------------


def test_a_new_runtime_finds_everything(tmp_path: Path) -> None:
    """Rows of both file tiers are found by the next runtime, after a stop and after a SIGKILL of the whole tree: with pins
    and marks, and after a stop with their hits."""
    try:
        with Runtime(CONFIG, state_dir=tmp_path) as runtime, runtime.client() as client:
            replies = {}
            for tier in FILE_TIERS:
                model = load(client, tier=tier, name=tier)
                replies[tier] = ask(client, model, T12, prefix_checkpoint_len=6).generated
                for _ in range(3):
                    assert ask(client, model, T12).cache_hit_kind == "exact"
            before = described(client)
            assert max(row.hits for row in client.cache.dump()) == 3
        for ending in ("stop", "kill"):
            with Runtime(CONFIG, state_dir=tmp_path) as runtime, runtime.client() as client:
                wait_for(lambda: described(client) == before, "the same rows")
                assert max(row.hits for row in client.cache.dump()) == (3 if ending == "stop" else 4)
                for tier in FILE_TIERS:
                    model = load(client, tier=tier, name=tier)
                    again = client.complete(model, T12, response_tokens=4)
                    assert (again.cache_hit_kind, again.hit_source, again.generated) == ("exact", tier, replies[tier])
                if ending == "kill":
                    os.kill(runtime.processes()["supervisor"], signal.SIGKILL)
        with Runtime(CONFIG, state_dir=tmp_path) as runtime, runtime.client() as client:
            wait_for(lambda: described(client) == before, "the same rows")
            check_books(client, runtime)
            for tier in FILE_TIERS:
                model = load(client, tier=tier, name=tier)
                assert client.complete(model, T12, response_tokens=4).hit_source == tier
                assert not [path for path in files_of(runtime, tier) if path.suffix != ".kvc"]
    finally:
        shutil.rmtree(root_of(runtime, "ram_file"), ignore_errors=True)


def described(client: Client) -> list[tuple[bytes, int, str, bool]]:
    """Every row, without what moves by itself."""
    return sorted((row.key, row.tokens, row.reason, row.pinned) for row in client.cache.dump())


def test_a_stop_saves_what_no_tier_has(tmp_path: Path) -> None:
    """What was only live, because its save was dropped, is stored by the unload; what is stored already is not saved again."""
    tiers = CONFIG["tiers"] | {"ram": {"enabled": False, "quota_bytes": "1MiB"}}
    with Runtime(CONFIG | {"tiers": tiers}, state_dir=tmp_path) as runtime, runtime.client() as client:
        model = load(client, tier="disk", name="m")
        index = kill(runtime, "index")
        first = client.complete(model, T12, response_tokens=4)
        came_back(runtime, "index", index)
        tiers_have_reported(client)
        client.unload(model)
        assert load(client, tier="disk", name="m", policy={"min_tokens": 5}) is not None
        model = client.models()[0].model_id
        again = client.complete(model, first.context_tokens, response_tokens=1)
        assert (again.cache_hit_kind, again.hit_source) == ("exact", "disk")
        nothing_is_on_its_way(client)
        before = client.counters()
        client.unload(model)
        assert not [name for name in moved(client, before) if name.startswith(("saves_", "bytes_", "duplicate"))]
        check_books(client, runtime)
    shutil.rmtree(root_of(runtime, "ram_file"), ignore_errors=True)
