"""The cache as callers see it, on whole runtimes: what hits, from where, what is written, what is kept."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from barrel_inference import Client, Runtime
from tests.process.caching import (
    CONFIG,
    FILE_TIERS,
    L12,
    T12,
    TIERS,
    ask,
    check_books,
    files_of,
    forget,
    load,
    load_tiny,
    moved,
    rows,
    saved,
)
from tests.process.killing import wait_for


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    """One tree for the module; each test loads models of its own."""
    with Runtime(CONFIG) as made:
        yield made


@pytest.fixture(scope="module")
def client(runtime: Runtime) -> Iterator[Client]:
    """A client of it."""
    with runtime.client() as made:
        yield made


@pytest.fixture(autouse=True)
def _balanced(runtime: Runtime, client: Client) -> Iterator[None]:
    """After each test the books are right."""
    yield
    check_books(client, runtime)


# --- hits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_cold_then_exact(client: Client, tier: str) -> None:
    """A re-sent prompt is `exact` from its tier, costs no prefill but its last token, says the same, and counts once."""
    model = load(client, tier=tier)
    before = client.counters()
    cold = ask(client, model, L12)
    assert (cold.cache_hit_kind, cold.cache_delta.read, cold.cache_delta.created) == ("cold", 0, cold.committed_tokens)
    assert cold.context_tokens == [*T12, *cold.generated]
    first = moved(client, before)
    assert (first["saves_cold"], first["saves_finish"], first["misses"]) == (1, 1, 2)  # `forget` is a miss too
    before = client.counters()
    again = ask(client, model, L12)
    assert (again.cache_hit_kind, again.hit_source, again.cache_delta.read) == ("exact", tier, 12)
    assert (again.generated, again.cache_delta.created, again.finish_key) == (cold.generated, 0, cold.finish_key)
    second = moved(client, before)
    assert (second["hits_exact"], second["tokens_reused"]) == (1, 12)
    assert not [name for name in second if name.startswith(("saves_", "bytes_"))]
    assert client.last_cache_hit(model) == {"kind": "exact", "prefix_tokens": 12}
    client.unload(model)


@pytest.mark.parametrize("tier", FILE_TIERS)
def test_a_save_larger_than_the_memory_that_it_waits_in(client: Client, tier: str) -> None:
    """All of it is stored: later nodes wait for the room of earlier ones, which are on their way to files."""
    model = load(client, tier=tier, bytes_per_token=16384)  # a node has 4 MiB, and there are 16
    prompt = list(range(1, 1601))
    ask(client, model, prompt)
    again = ask(client, model, prompt)
    assert (again.cache_hit_kind, again.hit_source, again.cache_delta.read) == ("exact", tier, 1600)
    client.unload(model)


def test_live_cells_come_first(client: Client) -> None:
    """While the sequence still holds a prompt, that is used, and no tier is asked to give anything."""
    model = load(client)
    cold = saved(client, client.complete(model, L12, response_tokens=4))
    again = client.complete(model, L12, response_tokens=4)
    assert (again.cache_hit_kind, again.hit_source, again.generated) == ("exact", "live", cold.generated)
    client.unload(model)


@pytest.mark.parametrize("tier", TIERS)
def test_shared_head(client: Client, tier: str) -> None:
    """A prompt that shares 3,000 tokens with a stored one and then differs reuses them, and says where it differs."""
    model = load(client, tier=tier)
    head = [number % 50_000 for number in range(60_000, 63_000)]
    ask(client, model, [*head, *range(500)], tokens=1)
    other = [*head, *range(70_001, 70_301)]
    partial = ask(client, model, other)
    assert (partial.cache_hit_kind, partial.hit_source, partial.cache_delta.read) == ("partial", tier, 3000)
    assert partial.miss_reason == "diverged"
    assert partial.divergence_byte is not None
    assert 0 <= partial.divergence_byte - len("".join(f"{token} " for token in head)) < 6
    assert partial.context_tokens == [*other, *partial.generated]
    alone = load(client)
    assert client.complete(alone, other, response_tokens=4).generated == partial.generated
    client.unload(model)
    client.unload(alone)


def test_longest_prefix_and_why_not(client: Client) -> None:
    """One word more hits the stored prompt; a short match, another model and a diverging prompt say why they are cold."""
    model, other = load(client), load(client)
    assert client.complete(model, L12, response_tokens=4).miss_reason == "no_entry"
    forget(client, model)
    before = client.counters()
    assert ask(client, model, f"{L12} 13").cache_delta.read == 12
    assert moved(client, before)["hits_longest_prefix"] == 1
    forget(client, model)
    assert client.complete(model, [999, *T12], response_tokens=1).miss_reason == "diverged"
    forget(client, model)
    short = client.complete(model, [1, 2, 3, 999, 998], response_tokens=1)
    assert (short.cache_hit_kind, short.cache_delta.read, short.miss_reason) == ("cold", 0, "too_short")
    assert client.complete(other, L12, response_tokens=1).miss_reason == "no_entry"
    client.unload(model)
    client.unload(other)


def test_gates_close(client: Client) -> None:
    """Below `min_tokens` nothing is stored or found, no key is given, and the index has no row."""
    model = load(client, policy={"min_tokens": 10_000, "cold_min_tokens": 10_000, "cold_max_tokens": 20_000})
    for _ in range(2):
        result = client.complete(model, L12, response_tokens=4)
        assert (result.cache_hit_kind, result.cache_delta.read, result.cache_delta.created) == ("cold", 0, 0)
        assert result.finish_key is None
        forget(client, model)
    assert rows(client, model) == []
    client.unload(model)


def test_all_gates_closed(client: Client) -> None:
    """With an infinite `min_tokens` nothing is ever stored: not by requests, not for a session that is given up, not at an
    unload."""
    model = load(client, policy={"min_tokens": float("inf")})
    assert client.complete(model, L12, session_id="s", response_tokens=4).finish_key is None
    assert client.complete(model, [50, *T12], response_tokens=4).cache_hit_kind == "cold"
    client.unload(model)
    assert rows(client, model) == []


# --- parent keys ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("live", [True, False])
def test_parent_key(client: Client, tier: str, live: bool) -> None:
    """A prompt that goes on from its parent counts as resumed, wherever the parent's state is."""
    model = load(client, tier=tier)
    parent = saved(client, client.prefill_only(model, T12))
    if not live:
        forget(client, model)
    before = client.counters()
    more = client.prefill_only(model, [*T12, 13], parent_key=parent.finish_key)
    assert (more.cache_hit_kind, more.cache_delta.read, more.cache_delta.created) == ("partial", 12, 1)
    assert more.context_tokens == [*T12, 13]
    assert more.finish_key not in (None, parent.finish_key)
    news = moved(client, before)
    assert news.get("hits_resume") == 1, news
    saved(client, more)
    forget(client, model)
    exact = client.complete(model, L12, parent_key=parent.finish_key, response_tokens=1)
    assert (exact.cache_hit_kind, exact.cache_delta.read) == ("exact", 12)
    assert client.last_cache_hit(model) == {"kind": "exact", "prefix_tokens": 12}
    client.unload(model)


def test_a_parent_that_is_no_prefix(client: Client) -> None:
    """A parent key of other bytes, or of nothing, gives no state and no hit; the rest of the lookup goes on."""
    model = load(client)
    parent = ask(client, model, [500, 501, 502, 503])
    ask(client, model, T12)
    forget(client, model)
    for last, key in ((13, parent.finish_key), (14, bytes(32))):
        before = client.counters()
        result = client.complete(model, [*T12, last], parent_key=key, response_tokens=1)
        assert (result.cache_hit_kind, result.cache_delta.read) == ("partial", 12)
        assert result.context_tokens[:13] == [*T12, last]
        assert "hits_resume" not in moved(client, before)
        forget(client, model)
    assert {row.hits for row in rows(client, model) if row.key == parent.finish_key} == {0}
    client.unload(model)


# --- what is stored ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", FILE_TIERS)
@pytest.mark.parametrize("session", [None, "s"])
def test_ten_turns_are_written_once(runtime: Runtime, client: Client, tier: str, session: str | None) -> None:
    """After ten turns the tier holds each token's KV once: at most 1.15 times the KV of the final context."""
    model = load(client, tier=tier, bytes_per_token=2048, context={"n_ctx": 4096})
    there = set(files_of(runtime, tier))
    context: list[int] = []
    for turn in range(10):
        prompt = [*context, *range(turn * 1000, turn * 1000 + 60)]
        result = client.complete(model, prompt, session_id=session, response_tokens=40)
        assert result.cache_delta.read == len(context)
        context = saved(client, result).context_tokens
        if session is None:
            forget(client, model)
    size_bytes = sum(path.stat().st_size for path in set(files_of(runtime, tier)) - there)
    assert len(context) == 1000
    assert 1000 * 2048 <= size_bytes <= 1.15 * 1000 * 2048
    client.unload(model)


@pytest.mark.parametrize("tier", FILE_TIERS)
def test_two_chats_share_their_head(runtime: Runtime, client: Client, tier: str) -> None:
    """The whole blocks of a head of 600 tokens are stored once, and the second chat reads all of the head."""
    model = load(client, tier=tier, bytes_per_token=2048)
    there = set(files_of(runtime, tier))
    head = list(range(30_000, 30_600))
    ask(client, model, [*head, *range(100)])
    second = ask(client, model, [*head, *range(100, 200)])
    assert (second.cache_hit_kind, second.cache_delta.read) == ("partial", 600)
    size_bytes = sum(path.stat().st_size for path in set(files_of(runtime, tier)) - there)
    assert size_bytes <= 1.15 * 2048 * (512 + 2 * (88 + 104))
    client.unload(model)


def test_one_save_one_file(runtime: Runtime, client: Client) -> None:
    """A prefill of twelve tokens leaves exactly one file and one row, and its name and size are those of the row."""
    model = load(client, tier="disk", policy={"cold_min_tokens": 1000})
    there = set(files_of(runtime, "disk"))
    saved(client, client.prefill_only(model, T12))
    [path] = set(files_of(runtime, "disk")) - there
    [row] = rows(client, model)
    assert (path.suffix, path.stat().st_size) == (".kvc", row.size_bytes)
    assert (row.tokens, row.text_bytes, row.reason, row.tier) == (12, len(L12) + 1, "finish", "disk")
    client.unload(model)


def test_continued_saves_count_from_the_prompt(client: Client) -> None:
    """A continued save comes every `continued_interval` generated tokens, counted from the end of the prompt."""
    model = load(client, policy={"boundary_trim_tokens": 2, "continued_interval": 4})
    before = client.counters()
    saved(client, client.complete(model, T12, response_tokens=9))
    assert moved(client, before)["saves_continued"] == 2
    assert sorted({row.tokens for row in rows(client, model)}) == [10, 16, 20, 21]
    client.unload(model)


# --- pins -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_a_static_head(client: Client, tier: str) -> None:
    """A head that the caller names is a row of its own, pinned, kept by a collection, and hit again after it."""
    model = load(client, tier=tier)
    before = client.counters()
    ask(client, model, L12, prefix_checkpoint_len=6)
    assert moved(client, before)["saves_agent_prefix"] == 1
    assert [(row.tokens, row.pinned) for row in rows(client, model) if row.reason == "agent_prefix"] == [(6, True)]
    client.cache.gc()
    assert [(row.tokens, row.pinned) for row in rows(client, model)] == [(6, True)]
    before = client.counters()
    again = ask(client, model, L12)
    assert (again.cache_delta.read, again.cache_hit_kind, again.hit_source) == (6, "partial", tier)
    assert moved(client, before)["hits_longest_prefix"] == 1
    ask(client, model, [*range(40, 60)], prefix_checkpoint_len=8)
    assert [row.tokens for row in rows(client, model) if row.pinned] == [8]
    client.cache.gc()
    assert {row.tokens for row in rows(client, model)} == {8}
    client.unload(model)


def test_without_a_static_head(client: Client) -> None:
    """Nothing is pinned that nobody named."""
    model = load(client)
    before = client.counters()
    ask(client, model, L12)
    assert "saves_agent_prefix" not in moved(client, before)
    assert not [row for row in rows(client, model) if row.pinned]
    client.unload(model)


# --- real engines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "window", "recurrent", "hybrid"])
def test_real_memory(client: Client, tiny_models: Mapping[str, Path], kind: str) -> None:
    """Every kind of memory: the same text and kind `exact` from each tier, and a longer prompt continues a stored one.

    The cold save ends before the prompt does, as with the gates' defaults: what makes it exact comes with the finish save.
    """
    prompt = [3 + number * 7 % 200 for number in range(90)]
    for tier in TIERS:
        model = load_tiny(client, tiny_models[kind], tier=tier, boundary_align_tokens=64)
        cold = saved(client, client.complete(model, prompt, response_tokens=12))
        client.complete(model, [9, 9], response_tokens=0)
        again = saved(client, client.complete(model, prompt, response_tokens=12))
        assert (again.cache_hit_kind, again.hit_source, again.cache_delta.read) == ("exact", tier, 90)
        assert again.generated == cold.generated
        client.complete(model, [9, 9], response_tokens=0)
        longer = client.complete(model, [*cold.context_tokens, 17, 18], response_tokens=1)
        assert (longer.cache_hit_kind, longer.cache_delta.read) == ("partial", cold.committed_tokens)
        client.unload(model)


def test_shared_sequences(client: Client) -> None:
    """The same prompt on another sequence hits too, and dozens at once are all right."""
    model = load(client, context={"n_seq_max": 4})
    with client.stream(model, L12, response_tokens=3) as first:
        whole = first.result().generated
    streams = [client.stream(model, f"{L12} {number % 5}", response_tokens=3) for number in range(20)]
    replies = [stream.result() for stream in streams]
    assert client.complete(model, L12, response_tokens=3).generated == whole
    for number, reply in enumerate(replies):
        assert reply.generated == replies[number % 5].generated
    wait_for(lambda: client.queue_depth(model) == 0, "all are done")
    client.unload(model)
