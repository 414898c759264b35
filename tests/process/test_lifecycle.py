"""The life of a request through the whole runtime: router, model process, index, RAM tier. Stub and tiny real models."""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from barrel_inference import (
    BarrelError,
    Client,
    ContextOverflow,
    GrammarFailed,
    InvalidArgument,
    NoSession,
    NotFound,
    Runtime,
    SeqCapacity,
    StickyBusy,
    TranscriptMismatch,
)  # fmt: skip
from tests.model.tiny_gguf import KINDS

POLICY = {"min_tokens": 4, "cold_min_tokens": 4, "cold_max_tokens": 1000, "boundary_trim_tokens": 0,
          "boundary_align_tokens": 1}  # fmt: skip
SMALL = {"tiers": {"ram": {"quota_bytes": "64MiB"}, "ram_file": {"enabled": False}, "disk": {"enabled": False}},
         "writer": {"processes": 1}}  # fmt: skip
WORDS = " ".join(str(number) for number in range(1, 13))
DEADLINE_S = 60.0


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


def stub(client: Client, **options: Any) -> str:
    """A fresh stub model in a namespace of its own."""
    number = next(_NUMBER)
    context = {"n_ctx": 4096, "n_batch": 64} | options.pop("context_opts", {})
    policy = POLICY | options.pop("policy", {})
    return client.load_model(f"stub-{number}", backend="stub", context_opts=context, policy=policy, **options)


def tiny(client: Client, path: Path, **context: Any) -> str:
    """A fresh tiny real model, in a namespace of its own."""
    fingerprint = next(_NUMBER).to_bytes(32, "little")
    opts = {"n_ctx": 1024, "n_batch": 128, "n_threads": 1} | context
    return client.load_model(
        path, context_opts=opts, policy=POLICY, fingerprint=fingerprint, fingerprint_mode="fast_unsafe"
    )


def test_model_info(client: Client) -> None:
    """A fresh model reports what it was loaded with."""
    model = stub(client, context_opts={"n_seq_max": 1})
    info = client.model_info(model)
    assert model.startswith("barrel_inference_model_")
    assert (info.backend, info.phase, info.context_size, info.n_seq_max, info.available_seqs) == (
        "stub",
        "idle",
        4096,
        1,
        1,
    )
    assert (info.quant_type, info.quant_bits, info.tier, info.pending_len, info.last_cache_hit) == (
        "f16",
        16,
        "ram",
        0,
        None,
    )
    assert len(info.fingerprint) == 32


def test_cold_then_exact_then_longer(client: Client) -> None:
    """The counts of a cold, a repeated and a longer prompt, with the finish key of all that was computed."""
    model = stub(client)
    cold = client.complete(model, WORDS, response_tokens=4)
    assert (cold.cache_hit_kind, cold.cache_delta.read, cold.cache_delta.created) == ("cold", 0, 16)
    assert cold.committed_tokens == 16 == len(cold.context_tokens)
    assert cold.finish_key is not None
    client.complete(model, "99 98 97 96 95 94 93", response_tokens=2)  # takes the only sequence
    again = client.complete(model, WORDS, response_tokens=4)
    assert (again.cache_hit_kind, again.hit_source, again.cache_delta.read) == ("exact", "ram", 12)
    assert (again.cache_delta.created, again.reply, again.finish_key) == (0, cold.reply, cold.finish_key)
    longer = client.complete(model, WORDS + " 13", response_tokens=1)
    assert (longer.cache_hit_kind, longer.cache_delta.read) == ("partial", 12)
    assert client.last_cache_hit(model) == {"kind": "partial", "prefix_tokens": 12}


def test_no_policy_saves_when_min_tokens_is_infinite(client: Client) -> None:
    """`min_tokens = inf` saves nothing and gives no finish key."""
    model = stub(client, policy={"min_tokens": float("inf")})
    result = client.complete(model, WORDS, response_tokens=4)
    assert (result.finish_key, result.cache_delta.created) == (None, 0)


def test_prefill_only_and_divergence(client: Client) -> None:
    """Prefill stores the prompt; a prompt that differs in its fifth token reuses four."""
    model = stub(client)
    first = client.prefill_only(model, [10, 11, 12, 13, 14])
    assert (first.context_tokens, first.committed_tokens, first.cache_hit_kind) == ([10, 11, 12, 13, 14], 5, "cold")
    second = client.prefill_only(model, [10, 11, 12, 13, 140, 99])
    assert (second.cache_hit_kind, second.cache_delta.read) == ("partial", 4)
    assert second.context_tokens == [10, 11, 12, 13, 140, 99]


def test_sessions(client: Client) -> None:
    """Sticky turns, continuation with and without a transcript check, reset and end."""
    model = stub(client, context_opts={"n_seq_max": 2})
    start = client.complete(model, WORDS, response_tokens=3, session_id="a")
    assert start.committed_tokens == 15
    with pytest.raises(TranscriptMismatch) as mismatch:
        client.continue_(model, [1], session_id="a", expect_committed=[*start.context_tokens, 5])
    assert mismatch.value.details == {"stored": 15, "expected": 16, "diverge": 15}
    more = client.continue_(
        model, [12345, 67890, 11111], session_id="a", expect_committed=start.context_tokens, response_tokens=1
    )
    assert (more.cache_hit_kind, more.cache_delta.read, more.prompt_tokens) == ("continuation", 15, 18)
    sticky = client.complete(model, [*more.context_tokens, 7], response_tokens=1, session_id="a")
    assert (sticky.cache_hit_kind, sticky.cache_delta.read) == ("sticky", 19)
    partial = client.complete(model, [*start.context_tokens[:13], 8, 9], response_tokens=1, session_id="a")
    assert (partial.cache_hit_kind, partial.cache_delta.read) == ("partial", 13)
    cold = client.complete(model, [*start.context_tokens[:2], 8, 9, 10], response_tokens=1, session_id="a")
    assert cold.cache_hit_kind == "cold"
    empty = client.continue_(model, [], session_id="a", response_tokens=2)
    assert empty.completion_tokens == 2
    client.end_session(model, "a")
    with pytest.raises(NoSession):
        client.continue_(model, [1], session_id="a")
    with pytest.raises(NoSession):
        client.reset_session(model, "a")


def test_busy_session_and_reset_while_streaming(client: Client) -> None:
    """A second turn is `sticky_busy`; a reset cancels what runs and lets a new turn in."""
    model = stub(client, model_opts={"step_ms": 5}, context_opts={"n_seq_max": 2})
    with client.stream(model, WORDS, session_id="s", response_tokens=2000) as stream:
        next(stream)
        with pytest.raises(StickyBusy):
            client.complete(model, WORDS, session_id="s")
        client.reset_session(model, "s")
        assert [event.result.finish_reason for event in stream if event.result] == ["cancelled"]
    assert client.complete(model, WORDS, session_id="s", response_tokens=1).finish_reason == "length"


def test_full_house(client: Client) -> None:
    """With every sequence streaming, fail-fast admission is `seq_capacity`; a waiting one is served in its turn."""
    model = stub(client, model_opts={"step_ms": 5}, context_opts={"n_seq_max": 1})
    with client.stream(model, WORDS, response_tokens=2000) as stream:
        next(stream)
        with pytest.raises(SeqCapacity):
            client.complete(model, "5 6", on_full="error")
        with client.stream(model, "7 8 9", response_tokens=2) as queued:
            stream.cancel()
            assert [event.result.finish_reason for event in queued if event.result] == ["length"]
        assert [event.result.finish_reason for event in stream if event.result] == ["cancelled"]


def test_idle_session_gives_way(client: Client) -> None:
    """A queued request is served by reclaiming an idle session's sequence; its text is in the cache."""
    model = stub(client)
    kept = client.complete(model, WORDS, response_tokens=10, session_id="idle")
    assert client.complete(model, "50 51 52 53 54 55", response_tokens=2).finish_reason == "length"
    with pytest.raises(NoSession):
        client.continue_(model, [1], session_id="idle")
    back = client.prefill_only(model, kept.context_tokens)
    assert (back.cache_hit_kind, back.hit_source) == ("exact", "ram")


def test_cancel(client: Client) -> None:
    """Cancelling ends one stream; unknown ids are fine; the model serves on."""
    model = stub(client, model_opts={"step_ms": 2})
    with client.stream(model, WORDS, response_tokens=3000) as stream:
        next(stream)
        client.cancel(stream.request_id)
        client.cancel(stream.request_id)
        client.cancel("nobody")
        last = [event.result for event in stream][-1]
    assert last is not None
    assert (last.cancelled, last.finish_reason) == (True, "cancelled")
    assert client.complete(model, WORDS, response_tokens=1).finish_reason == "length"


def test_one_failing_stream_leaves_three(client: Client) -> None:
    """A request whose step fails gets an error; its three neighbours finish as if alone."""
    model = stub(client, model_opts={"fail_on_token": 666}, context_opts={"n_seq_max": 4})
    prompts = [f"{n} {WORDS}" for n in (100, 200, 300)]
    with ThreadPoolExecutor(4) as pool:
        bad = pool.submit(client.complete, model, f"{WORDS} 666 5", response_tokens=30)
        good = [pool.submit(client.complete, model, prompt, response_tokens=30) for prompt in prompts]
        with pytest.raises(BarrelError, match="refused a step"):
            bad.result()
        replies = [future.result().reply for future in good]
    alone = stub(client)
    assert replies == [client.complete(alone, prompt, response_tokens=30).reply for prompt in prompts]


def test_secrets_never_cross(client: Client) -> None:
    """200 interleaved requests with secrets of their own on four sequences, some cancelled: every reply is its solo reply."""
    model = stub(client, context_opts={"n_seq_max": 4, "kv_cells": 4096})
    solo = stub(client)
    prompts = [f"{WORDS} {number * 7919} {number} {number + 1}" for number in range(200)]

    def ask(number: int) -> str | None:
        if number % 10 == 3:
            with client.stream(model, prompts[number], response_tokens=50) as stream:
                next(stream)
            return None
        return client.complete(model, prompts[number], response_tokens=6).reply

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(ask, range(200)))
    for number in range(0, 200, 7):
        if replies[number] is not None:
            assert replies[number] == client.complete(solo, prompts[number], response_tokens=6).reply


def test_herd_prefills_its_head_once(client: Client) -> None:
    """Four simultaneous requests with one uncached head of 1,024 tokens: at most 1.1 × the distinct tokens are prefilled."""
    model = stub(client, context_opts={"n_seq_max": 4, "n_batch": 256, "kv_cells": 8192})
    before = client.counters()["tokens_prefilled"]
    head = list(range(1, 1025))
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda n: client.complete(model, [*head, *range(n * 5000, n * 5000 + 32)], response_tokens=2),
                range(1, 5),
            )
        )
    assert client.counters()["tokens_prefilled"] - before <= 1.1 * 1152


def test_two_chats_alternate_on_one_sequence(client: Client) -> None:
    """Ten turns each on one sequence, with a common head: at most 1.05 × the distinct tokens are prefilled."""
    model = stub(client)
    before = client.counters()["tokens_prefilled"]
    head = list(range(1, 601))
    contexts = {1: list(head), 2: list(head)}
    distinct = len(head)
    for turn in range(10):
        for chat, context in contexts.items():
            said = [chat * 100_000 + turn * 100 + k for k in range(30)]
            distinct += len(said)
            result = client.complete(model, [*context, *said], response_tokens=20)
            contexts[chat] = result.context_tokens
    assert client.counters()["tokens_prefilled"] - before <= 1.05 * distinct


def test_typed_errors_at_admission(client: Client) -> None:
    """Over-long, empty, unknown and malformed requests are named errors, and the model keeps serving."""
    model = stub(client, context_opts={"n_ctx": 64})
    with pytest.raises(ContextOverflow, match=r"65 tokens.*64"):
        client.complete(model, list(range(1, 66)))
    with pytest.raises(ContextOverflow):
        client.complete(model, list(range(1, 65)))
    assert client.complete(model, list(range(1, 64))).completion_tokens == 1
    nothing: tuple[str | bytes | list[int], ...] = ("", b"", [])
    for empty in nothing:
        with pytest.raises(InvalidArgument, match="empty"):
            client.complete(model, empty)
    with pytest.raises(NotFound, match="nobody"):
        client.complete("nobody", "1")
    with pytest.raises(InvalidArgument, match="temperature"):
        client.complete(model, "1", temperature=-1.0)
    with pytest.raises(InvalidArgument):
        client.complete(model, [1 << 30])
    with pytest.raises((InvalidArgument, ContextOverflow)):
        client.complete(model, "a" * (64 * 1024 * 1024 + 1))
    assert client.complete(model, "1 2 3", response_tokens=1).completion_tokens == 1


def test_thinking_events(client: Client) -> None:
    """Thinking is streamed apart, closed once, cut by its budget, and absent when it is off; every token is in the list."""
    model = stub(client, model_opts={"thinking_tokens": 3}, thinking_markers=["<think>", "</think>"])
    events = list(client.stream(model, WORDS, response_tokens=10, thinking=True))
    kinds = [event.kind for event in events]
    assert kinds.count("thinking_end") == 1
    assert kinds.index("thinking") < kinds.index("thinking_end")
    result = events[-1].result
    assert result is not None
    assert [t for event in events for t in event.token_ids] == result.generated
    budget = list(client.stream(model, WORDS, response_tokens=10, thinking=True, thinking_budget_tokens=1))
    assert [event.kind for event in budget].count("thinking") == 1
    assert [event.kind for event in budget].count("thinking_end") == 1
    plain = list(client.stream(model, WORDS, response_tokens=10))
    assert {event.kind for event in plain} == {"token", "done"}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_real_memory_cold_equals_warm(client: Client, tiny_models: Mapping[str, Path], kind: str) -> None:
    """For every kind of memory: the same greedy text cold and warm, exact after another prompt, partial for a longer one."""
    model = tiny(client, tiny_models[kind])
    prompt = "the cat sat on the mat and another thing sat there too, in the rain. " * 3
    cold = client.complete(model, prompt, response_tokens=12)
    client.complete(model, "something else that is long enough to take all of the cells away " * 2, response_tokens=12)
    warm = client.complete(model, prompt, response_tokens=12)
    assert (warm.cache_hit_kind, warm.cache_delta.read, warm.generated) == ("exact", warm.prompt_tokens, cold.generated)
    assert warm.hit_source == "ram"
    client.complete(model, "something else that is long enough to take all of the cells away " * 2, response_tokens=12)
    longer = client.complete(model, prompt + "And then?", response_tokens=12)
    assert (longer.cache_hit_kind, longer.cache_delta.read >= cold.prompt_tokens - 1) == ("partial", True)
    fresh = tiny(client, tiny_models[kind])
    assert client.complete(fresh, prompt + "And then?", response_tokens=12).generated == longer.generated


def test_seeds(client: Client, tiny_models: Mapping[str, Path]) -> None:
    """One seed gives one text, another seed another; greedy text has no seed."""
    model = tiny(client, tiny_models["dense"])

    def text(**options: Any) -> list[int]:
        return client.complete(model, "the cat sat on the mat", response_tokens=12, **options).generated

    assert text(temperature=0.9, seed=42) == text(temperature=0.9, seed=42)
    assert text(temperature=0.9, seed=42) != text(temperature=0.9, seed=99)
    assert text(temperature=0.0, seed=1) == text(temperature=0.0, seed=2)


def test_grammars(client: Client, tiny_models: Mapping[str, Path]) -> None:
    """A grammar binds its own request only; a bad or dead-end one is `grammar_failed` and harms nobody."""
    model = tiny(client, tiny_models["dense"], n_seq_max=2)
    free = client.complete(model, "the cat", response_tokens=8)
    bound = client.complete(model, "the cat", response_tokens=8, grammar='root ::= "yes" | "no"')
    assert bound.reply in ("yes", "no")
    assert bound.finish_reason == "stop"
    json = client.complete(model, "the cat", response_tokens=40, json_schema='{"type": "boolean"}')
    assert json.reply.strip() in ("true", "false")
    with pytest.raises(GrammarFailed):
        client.complete(model, "the cat", grammar="root ::= (")
    assert client.complete(model, "the cat", response_tokens=8).generated == free.generated


def test_deterministic_replies_equal_their_solo_runs(client: Client, tiny_models: Mapping[str, Path]) -> None:
    """With `deterministic`, whatever was cached before and in whatever order they ran, each greedy reply is its solo reply."""
    model = tiny(client, tiny_models["dense"], n_seq_max=3, deterministic=True)
    head = "the cat sat on the mat and the dog sat on the cat. " * 6
    prompts = [f"{head}{name} said" for name in ("ann", "bob", "cid", "ann", "bob", "dan")]
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda prompt: client.complete(model, prompt, response_tokens=16).generated, prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        solo = tiny(client, tiny_models["dense"], deterministic=True)
        assert client.complete(solo, prompt, response_tokens=16).generated == reply
        client.unload(solo)


def test_adapters_change_when_nothing_runs(
    client: Client, tiny_models: Mapping[str, Path], tiny_adapters: list[Path]
) -> None:
    """A change of adapters saves and ends idle sessions; each set of adapters has a namespace of its own."""
    model = tiny(client, tiny_models["dense"])
    plain = client.complete(model, "the cat sat on the mat", response_tokens=6, session_id="s")
    client.set_adapters(model, [(tiny_adapters[0], 1.0)])
    assert [scale for _, scale in client.adapters(model)] == [1.0]
    with pytest.raises(NoSession):
        client.continue_(model, "!", session_id="s")
    adapted = client.complete(model, "the cat sat on the mat", response_tokens=6)
    assert (adapted.cache_hit_kind, adapted.generated != plain.generated) == ("cold", True)
    client.set_adapters(model, [])
    again = client.complete(model, "the cat sat on the mat", response_tokens=6)
    assert (again.cache_hit_kind, again.hit_source, again.generated) == ("exact", "ram", plain.generated)


def test_chat_and_text_tools(client: Client, tiny_models: Mapping[str, Path]) -> None:
    """Chat goes through the model's own template; tokenize, detokenize and embed are stable."""
    model = tiny(client, tiny_models["dense"])
    messages = [{"role": "user", "content": "the cat"}]
    ids = client.apply_chat_template(model, messages)
    assert len(client.apply_chat_template(model, [{"role": "system", "content": "x"}, *messages])) > len(ids)
    assert client.detokenize(model, ids).startswith(b"<|im_start|>user\nthe cat<|im_end|>")
    result = client.chat(model, messages, response_tokens=4)
    assert result.prompt_tokens == len(ids)
    text = "thé 日本 🙂"
    assert client.detokenize(model, client.tokenize(model, text, add_special=False)) == text.encode()
    one, two = client.embed(model, "the cat"), client.embed(model, "a dog")
    assert one == client.embed(model, "the cat")
    assert one != two


def test_a_slow_reader_loses_nothing(client: Client) -> None:
    """A reader that waits gets every token, in fewer events."""
    model = stub(client)
    with client.stream(model, WORDS, response_tokens=3000) as stream:
        first = next(stream)
        poll = threading.Event()
        while client.phase(model) != "idle":
            poll.wait(0.02)
        rest = list(stream)
    result = rest[-1].result
    assert result is not None
    assert [*first.token_ids, *(t for event in rest for t in event.token_ids)] == result.generated
    assert len(result.generated) == 3000


def test_load_unload_load(client: Client) -> None:
    """The same id can be loaded any number of times, one at a time."""
    for _ in range(3):
        assert client.load_model("again", "same", backend="stub") == "same"
        with pytest.raises(BarrelError) as taken:
            client.load_model("again", "same", backend="stub")
        assert taken.value.code == "already_loaded"
        client.unload("same")
    with pytest.raises(NotFound):
        client.unload("same")
