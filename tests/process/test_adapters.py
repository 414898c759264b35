"""LoRA adapters of a model that serves: whose cells are whose, and when a change takes place."""

import itertools
import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from barrel_inference import BadModel, Client, NoSession, Runtime
from tests.model.tiny_gguf import write_adapter
from tests.process.caching import POLICY, rows, saved
from tests.process.loads import ask, config, tiny

_fingerprints = itertools.count(1)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, tiny_models: Mapping[str, Path]) -> Iterator[Client]:
    """A client of one tree for the module."""
    folder = tmp_path_factory.mktemp("adapters")
    with Runtime(config(folder, tiny_models["dense"])) as runtime, runtime.client() as made:
        yield made


@pytest.fixture
def model(client: Client, tiny_models: Mapping[str, Path]) -> Iterator[str]:
    """A dense model in a namespace of its own."""
    own = next(_fingerprints).to_bytes(32, "big")
    made = tiny(client, tiny_models["dense"], fingerprint=own, fingerprint_mode="fast_unsafe")
    yield made
    client.unload(made)


def test_every_set_of_adapters_is_a_namespace(client: Client, model: str, tiny_adapters: list[Path]) -> None:
    """A, B, none, and A at another scale: each begins cold, answers its own, and finds its own again; scale 0 is none."""
    first, second = tiny_adapters
    sets = [[(first, 1.0)], [(second, 1.0)], [], [(first, 0.5)]]
    answers, fingerprints = [], set()
    for adapters in sets:
        assert client.set_adapters(model, adapters) == [(str(path), scale) for path, scale in adapters]
        cold = saved(client, ask(client, model))
        assert cold.cache_hit_kind == "cold"
        answers.append(cold.generated)
        fingerprints.add(client.model_info(model).fingerprint)
    assert len(fingerprints) == len(sets)
    assert answers[0] != answers[2] != answers[1]
    for adapters, generated in zip(sets, answers, strict=True):
        client.set_adapters(model, adapters)
        again = ask(client, model)
        assert (again.cache_hit_kind, again.hit_source, again.generated) == ("exact", "ram", generated)
    client.set_adapters(model, [(first, 0.0)])
    assert ask(client, model).generated == answers[2]


def test_adapters_at_load(client: Client, tiny_models: Mapping[str, Path], tiny_adapters: list[Path]) -> None:
    """The effective fingerprint is of content and scale, however they came; one that cannot be loaded changes nothing."""
    given = [(tiny_adapters[0], 1.0)]
    model = tiny(client, tiny_models["dense"], adapters=given)
    own = client.model_info(model).fingerprint
    with pytest.raises(BadModel, match="nowhere"):
        client.set_adapters(model, [("/nowhere.gguf", 1.0)])
    assert client.adapters(model) == [(str(tiny_adapters[0]), 1.0)]
    client.set_adapters(model, [])
    assert client.model_info(model).fingerprint != own
    client.set_adapters(model, given)
    assert client.model_info(model).fingerprint == own
    client.unload(model)
    with pytest.raises(BadModel, match="nowhere"):
        tiny(client, tiny_models["dense"], adapters=[("/nowhere.gguf", 1.0)])


def test_a_replaced_file_is_another_adapter(client: Client, model: str, tmp_path: Path) -> None:
    """The same path with other content misses what the former content saved."""
    path = tmp_path / "adapter.gguf"
    write_adapter(path, seed=1)
    client.set_adapters(model, [(path, 1.0)])
    saved(client, ask(client, model))
    write_adapter(path, seed=2)
    client.set_adapters(model, [(path, 1.0)])
    assert ask(client, model).cache_hit_kind == "cold"


def test_any_path_of_an_adapter(client: Client, model: str, tmp_path: Path) -> None:
    """A path that is no UTF-8 is used, told as it was given, and kept over a death; what is no file is refused, not waited for."""
    path = tmp_path / "no UTF-8 \udcff.gguf"
    write_adapter(path, seed=1)
    assert client.set_adapters(model, [(path, 1.0)]) == client.adapters(model) == [(str(path), 1.0)]
    os.kill(client.processes()[f"model:{model}"], signal.SIGKILL)
    assert ask(client, model).completion_tokens
    assert client.adapters(model) == [(str(path), 1.0)]
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "text.gguf").write_text("once upon a time")
    for name, reason in (
        ("pipe.gguf", "adapter .*no regular file"),
        ("text.gguf", "adapter .*no GGUF"),
        (".", "directory"),
    ):
        with pytest.raises(BadModel, match=reason):
            client.set_adapters(model, [(tmp_path / name, 1.0)])


def test_adapters_outlive_the_process(client: Client, model: str, tiny_adapters: list[Path]) -> None:
    """A model that died comes back with the adapters it had, and finds what was stored under them."""
    client.set_adapters(model, [(tiny_adapters[0], 1.0)])
    before = saved(client, ask(client, model))
    fingerprint = client.model_info(model).fingerprint
    os.kill(client.processes()[f"model:{model}"], signal.SIGKILL)
    again = ask(client, model)
    assert (again.cache_hit_kind, again.hit_source, again.generated) == ("exact", "ram", before.generated)
    assert client.adapters(model) == [(str(tiny_adapters[0]), 1.0)]
    assert client.model_info(model).fingerprint == fingerprint


def test_a_change_waits_and_ends_sessions(
    client: Client, tiny_models: Mapping[str, Path], tiny_adapters: list[Path]
) -> None:
    """A running request ends under the adapters it began with; a session is saved as `evict` in its old namespace and is over."""
    model = client.load_model(
        tiny_models["dense"], policy=POLICY | {"min_tokens": 10**9}, fingerprint_mode="fast_unsafe",
        fingerprint=next(_fingerprints).to_bytes(32, "big"), context_opts={"n_ctx": 512, "n_threads": 1, "n_seq_max": 2},
    )  # fmt: skip
    plain = client.complete(model, "a tale", response_tokens=200).generated
    client.complete(model, "in the beginning", session_id="s", response_tokens=5)
    assert rows(client, model) == []
    with ThreadPoolExecutor(1) as pool, client.stream(model, "a tale", response_tokens=200) as stream:
        events = iter(stream)
        first = next(events)
        change = pool.submit(client.set_adapters, model, [(tiny_adapters[0], 1.0)])
        rest = [token for event in events for token in event.token_ids or ()]
        change.result(60)
    assert [*(first.token_ids or ()), *rest] == plain
    with pytest.raises(NoSession):
        client.continue_(model, " and then", session_id="s")
    assert {row.reason for row in rows(client, model)} == {"evict"}
    assert client.complete(model, "in the beginning", response_tokens=5).cache_hit_kind == "cold"
    client.set_adapters(model, [])
    again = client.complete(model, "in the beginning", response_tokens=5)
    assert (again.cache_hit_kind, again.hit_source) == ("exact", "ram")
    client.unload(model)
