"""`policy.store_logits`: an identical prompt answers its first token without a decode, and says the same."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from barrel_inference import Client, Runtime
from barrel_inference.results import Completion
from barrel_inference.tiers import kvc
from tests.process.caching import CONFIG, TIERS, files_of, load, load_tiny, moved, nothing_is_on_its_way

PROMPT = [3 + number * 7 % 200 for number in range(90)]
OTHER = [9, 9]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.2, "top_k": 40, "seed": 7, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "grammar": {"grammar": "root ::= [a-z]{3,9}"},
    "logprobs": {"logprobs": 3, "logit_bias": {77: 2.5}},
}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    """One tree for the module; blocks are short, so that a prompt has several."""
    with Runtime(CONFIG | {"cache": {"block_tokens": 16}}) as made:
        yield made


@pytest.fixture(scope="module")
def client(runtime: Runtime) -> Iterator[Client]:
    """A client of it."""
    with runtime.client() as made:
        yield made


def again(client: Client, model: str, prompt: list[int], **options: Any) -> tuple[Completion, int]:
    """The same prompt once more, from a tier, and how many of its tokens were computed."""
    nothing_is_on_its_way(client)
    client.complete(model, OTHER, response_tokens=0)
    before = client.counters()
    reply = client.complete(model, prompt, response_tokens=12, **options)
    return reply, moved(client, before).get("tokens_prefilled", 0)


def said(reply: Completion) -> tuple[object, ...]:
    """All that a reply says."""
    return reply.generated, reply.reply, reply.finish_reason, reply.logprobs


@pytest.mark.parametrize(
    ("kind", "tiers"), [("dense", TIERS), ("window", ["disk"]), ("recurrent", ["ram"]), ("hybrid", ["ram_file"])]
)
def test_an_exact_hit_computes_nothing_of_its_prompt(
    client: Client, tiny_models: Mapping[str, Path], kind: str, tiers: Sequence[str]
) -> None:
    """Every kind of memory, from each tier, however the tokens are chosen: what a model without stored rows says."""
    without = load_tiny(client, tiny_models[kind], boundary_align_tokens=64)
    plain = {name: client.complete(without, PROMPT, response_tokens=12, **way) for name, way in WAYS.items()}
    client.unload(without)
    for tier in tiers:
        model = load_tiny(client, tiny_models[kind], tier=tier, store_logits=True, boundary_align_tokens=64)
        client.complete(model, PROMPT, response_tokens=12)
        for name, way in WAYS.items():
            reply, computed = again(client, model, PROMPT, **way)
            assert (reply.cache_hit_kind, reply.hit_source, reply.cache_delta.read, computed) == ("exact", tier, 90, 0)
            assert said(reply) == said(plain[name]), name
        client.unload(model)


def test_a_row_that_is_live_serves_too(client: Client, tiny_models: Mapping[str, Path]) -> None:
    """A warm sequence, a session, and a prompt that was only prefilled."""
    model = load_tiny(client, tiny_models["dense"], store_logits=True)
    assert client.prefill_only(model, PROMPT).cache_hit_kind == "cold"
    before = client.counters()
    first = client.complete(model, PROMPT, response_tokens=12)
    warm = client.complete(model, PROMPT, response_tokens=12, session_id="s")
    sticky = client.complete(model, PROMPT, response_tokens=12, session_id="s")
    assert "tokens_prefilled" not in moved(client, before)
    assert [one.cache_hit_kind for one in (first, warm, sticky)] == ["exact", "exact", "sticky"]
    assert said(first) == said(warm) == said(sticky)
    client.unload(model)


def test_a_longer_prompt_and_a_shorter_one(client: Client) -> None:
    """Rows serve the prompt that they end: what goes on from it, or ends before, computes its own."""
    model = load(client, policy={"store_logits": True, "boundary_align_tokens": 64})
    alone = load(client)
    client.complete(model, PROMPT, response_tokens=5)
    for prompt, kind in ((PROMPT[:70], "exact"), ([*PROMPT, 5, 6], "partial"), (PROMPT, "exact")):
        reply, computed = again(client, model, prompt)
        assert (reply.cache_hit_kind, computed > 0) == (kind, prompt is not PROMPT)
        assert reply.generated == client.complete(alone, prompt, response_tokens=12).generated
        reply, computed = again(client, model, prompt)
        assert (reply.cache_hit_kind, computed) == ("exact", 0)
    client.unload(model)
    client.unload(alone)


def test_a_damaged_row_gets_the_cold_answer(
    runtime: Runtime, client: Client, tiny_models: Mapping[str, Path]
) -> None:  # fmt: skip
    """One flipped byte of stored logits: the node goes, is counted, and is saved again."""
    model = load_tiny(client, tiny_models["dense"], tier="disk", store_logits=True)
    known = set(files_of(runtime, "disk"))
    cold = client.complete(model, PROMPT, response_tokens=12)
    nothing_is_on_its_way(client)
    before, damaged = client.counters(), 0
    for path in set(files_of(runtime, "disk")) - known:
        image = bytearray(path.read_bytes())
        _meta, where, _trailer = kvc.read_meta(bytes(image), len(image))
        if where.logits_bytes:
            image[where.logits_offset + 5] ^= 1
            path.write_bytes(image)
            damaged += 1
    assert damaged == 1
    reply, computed = again(client, model, PROMPT)
    assert (reply.generated, reply.cache_hit_kind, computed) == (cold.generated, "partial", 10)
    assert moved(client, before)["corrupt_files"] == 1
    reply, computed = again(client, model, PROMPT)
    assert (reply.generated, reply.cache_hit_kind, computed) == (cold.generated, "exact", 0)
    client.unload(model)


def test_adapters_have_rows_of_their_own(
    client: Client, tiny_models: Mapping[str, Path], tiny_adapters: list[Path]
) -> None:
    """A change of adapters is another namespace: no row of the one before is used, and they are back with it."""
    model = load_tiny(client, tiny_models["dense"], store_logits=True)
    plain = client.complete(model, PROMPT, response_tokens=12, logprobs=1)
    client.set_adapters(model, [(str(tiny_adapters[0]), 1.0)])
    adapted, computed = again(client, model, PROMPT, logprobs=1)
    assert (adapted.cache_hit_kind, computed) == ("cold", 90)
    assert adapted.logprobs != plain.logprobs
    client.set_adapters(model, [])
    back, computed = again(client, model, PROMPT, logprobs=1)
    assert (said(back), back.cache_hit_kind, computed) == (said(plain), "exact", 0)
    client.unload(model)
