"""`context_opts.deterministic`: what was cached, by whatever way, changes no bit of what comes next."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from barrel_inference import Client, Runtime
from barrel_inference.results import Completion
from tests.process.caching import CONFIG, POLICY, check_books, nothing_is_on_its_way

BLOCK_TOKENS = 16
TOKENS = 24
# 39: the second turn ends on the grid.
DETERMINISTIC = [
    *[("dense", 39), ("dense", 40), ("dense", 48), ("window", 40), ("recurrent", 40), ("hybrid", 39)],
]
_names = itertools.count(1)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    """One tree for the module; blocks are short, so that replies are longer than one."""
    with Runtime(CONFIG | {"cache": {"block_tokens": BLOCK_TOKENS}}) as made:
        yield made


@pytest.fixture(scope="module")
def client(runtime: Runtime) -> Iterator[Client]:
    """A client of it."""
    with runtime.client() as made:
        yield made


def load(client: Client, path: Path, *, fingerprint: int = 0) -> str:
    """A model in a namespace of its own, unless it is told whose."""
    number = fingerprint or next(_names)
    return client.load_model(
        path, tier="disk", policy=POLICY, fingerprint=number.to_bytes(32, "big"), fingerprint_mode="fast_unsafe",
        context_opts={"n_ctx": 1024, "n_batch": 128, "n_seq_max": 2, "n_threads": 1, "deterministic": True},
    )  # fmt: skip


def answer(client: Client, model: str, prompt: list[int], session_id: str | None = None) -> Completion:
    """A reply with the probabilities of what was likely, to the last bit."""
    return client.complete(model, prompt, response_tokens=TOKENS, logprobs=3, session_id=session_id)


@pytest.mark.parametrize(("kind", "prompt_tokens"), DETERMINISTIC)
@pytest.mark.parametrize("between", ["live", "session", "session given up", "reload"])
def test_a_second_turn_is_as_if_from_nothing(
    runtime: Runtime, client: Client, tiny_models: Mapping[str, Path], kind: str, prompt_tokens: int, between: str
) -> None:  # fmt: skip
    """A prompt whose beginning was generated, and the same again, say bit for bit what a fresh model says to them."""
    path, prompt = tiny_models[kind], [3 + (number * 7 + prompt_tokens) % 200 for number in range(prompt_tokens)]
    namespace = next(_names)
    model = load(client, path, fingerprint=namespace)
    session = "s" if "session" in between else None
    first = answer(client, model, prompt, session)
    nothing_is_on_its_way(client)
    if between == "reload":
        client.unload(model)
        model = load(client, path, fingerprint=namespace)
    if between == "session given up":
        session = None
    second = [*first.context_tokens, 17, 18]
    turn = answer(client, model, second, session)
    nothing_is_on_its_way(client)
    answer(client, model, [5, 6, 7])
    again = answer(client, model, second)
    client.unload(model)

    fresh = load(client, path)
    cold = answer(client, fresh, second)
    client.unload(fresh)
    for warm in (turn, again):
        assert (warm.generated, warm.logprobs) == (cold.generated, cold.logprobs)
        assert warm.cache_delta.read >= (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert again.cache_hit_kind == "exact"
    check_books(client, runtime)


@pytest.mark.real
def test_a_prompt_that_ends_with_a_whole_block(client: Client, smollm2: Path) -> None:
    """Real weights, where a token alone differs from the same in a slice: sent again, and gone on from, it is as if cold."""
    namespace, prompt = next(_names), [300 + number * 7919 % 40_000 for number in range(4 * BLOCK_TOKENS)]
    longer = [*prompt, *range(500, 520)]
    model = load(client, smollm2, fingerprint=namespace)
    cold = answer(client, model, prompt)
    nothing_is_on_its_way(client)
    turns = [answer(client, model, longer), answer(client, model, prompt)]
    assert [(turn.cache_hit_kind, turn.cache_delta.read) for turn in turns] == [("partial", 64), ("exact", 64)]
    client.unload(model)
    fresh = load(client, smollm2)
    want = answer(client, fresh, longer)
    client.unload(fresh)
    assert [(turn.generated, turn.logprobs) for turn in turns] == [
        (one.generated, one.logprobs) for one in (want, cold)
    ]
