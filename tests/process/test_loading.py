"""Loading models: each option of the guide shows its effect, or an error that names it. Tiny real models, the stub where it will do."""

import hashlib
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from barrel_inference import (
    AlreadyLoaded,
    BadModel,
    BarrelError,
    Client,
    ContextOverflow,
    InvalidArgument,
    NotFound,
    NotSupported,
    Runtime,
)  # fmt: skip
from barrel_inference.workers.model.cores import usable_cores
from tests.model.tiny_gguf import write_embedding_model, write_model
from tests.process.caching import POLICY, rows, saved
from tests.process.killing import wait_for
from tests.process.loads import PROMPT, ask, config, flags_of_mapping, locked_bytes, once, tiny


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory, tiny_models: Mapping[str, Path]) -> Iterator[Runtime]:
    """One tree for the module."""
    with Runtime(config(tmp_path_factory.mktemp("loading"), tiny_models["dense"])) as made:
        yield made


@pytest.fixture(scope="module")
def client(runtime: Runtime) -> Iterator[Client]:
    """A client of it."""
    with runtime.client() as made:
        yield made


@pytest.fixture
def dense(tiny_models: Mapping[str, Path], tmp_path: Path) -> Path:
    """A dense model with content of its own, so that no other test has saved anything for it."""
    path = tmp_path / "dense.gguf"
    data = bytearray(tiny_models["dense"].read_bytes())
    data[-4:] = hashlib.sha256(str(tmp_path).encode()).digest()[:3] + b"\x3c"  # one weight, of some hundredths
    path.write_bytes(data)
    return path


# --- ids and names


def test_ids_are_given_or_made_up(client: Client) -> None:
    """Made-up ids differ and begin as promised; a given id is taken once, and again after its unload."""
    first, second = (client.load_model("any", backend="stub") for _ in range(2))
    assert first != second
    assert first.startswith("barrel_inference_model_")
    for _ in range(2):
        assert client.load_model("any", "mine", backend="stub") == "mine"
        with pytest.raises(AlreadyLoaded, match="mine"):
            client.load_model("any", "mine", backend="stub")
        client.unload("mine")
    with pytest.raises(NotFound):
        client.unload("mine")
    for model in (first, second):
        client.unload(model)


def test_a_name_brings_its_options(client: Client) -> None:
    """A name from [models] loads under that name with its table's options; given options lie over them."""
    assert client.load_model("named") == "named"
    assert client.model_info("named").context_size == 512
    other = client.load_model("named", "other", context_opts={"n_ctx": 256})
    assert client.model_info(other).context_size == 256
    client.unload("named")
    client.unload(other)
    with pytest.raises(NotFound, match="unheard"):
        client.load_model("unheard")


def test_models_load_at_start(client: Client) -> None:
    """A model with autoload serves without being asked for; one that cannot is failed with its reason, the rest serves."""
    assert client.complete("auto", "1 2 3", response_tokens=2).completion_tokens == 2
    broken = wait_for(lambda: next((m for m in client.models() if m.model_id == "broken"), None), "it is listed")
    assert (broken.phase, "/nowhere/model.gguf" in (broken.reason or "")) == ("failed", True)
    assert "model:broken" not in client.processes()


def test_the_same_weights_twice(client: Client, dense: Path) -> None:
    """Two ids of one file are two processes with one cache: what one computed, the other reuses."""
    one, two = tiny(client, dense, "one"), tiny(client, dense, "two")
    processes = client.processes()
    assert processes["model:one"] != processes["model:two"]
    cold = saved(client, ask(client, one))
    warm = ask(client, two)
    assert (cold.cache_hit_kind, warm.cache_hit_kind, warm.hit_source) == ("cold", "exact", "ram")
    assert warm.generated == cold.generated
    client.unload(one)
    client.unload(two)


def test_two_models_share_a_cache_without_collision(
    client: Client, tiny_models: Mapping[str, Path], dense: Path
) -> None:
    """Different models that are asked the same at once answer as each does alone, cold and warm; no row has two owners."""
    models = [tiny(client, dense), tiny(client, tiny_models["hybrid"])]
    alone = [ask(client, model, "something else " + PROMPT) for model in models]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: ask(client, models[number % 2], "something else " + PROMPT), range(8)))
    for number, answer in enumerate(answers):
        assert answer.generated == alone[number % 2].generated
        assert answer.cache_hit_kind == "exact"
    keys = [{row.key for row in rows(client, model)} for model in models]
    assert all(keys)
    assert not keys[0] & keys[1]
    for model in models:
        client.unload(model)


# --- what identifies a model


def test_a_renamed_file_keeps_its_cache_and_an_edited_one_loses_it(client: Client, dense: Path) -> None:
    """The fingerprint is of the content: a new name changes nothing, one changed weight everything."""
    cold = once(client, dense, lambda model: saved(client, ask(client, model)))
    renamed = dense.rename(dense.with_name("renamed.gguf"))
    found = once(client, renamed, lambda model: (ask(client, model), client.model_info(model).fingerprint))
    assert (found[0].cache_hit_kind, found[0].generated) == ("exact", cold.generated)
    assert found[1] == hashlib.sha256(renamed.read_bytes()).digest()
    data = bytearray(renamed.read_bytes())
    data[-1] ^= 1
    renamed.write_bytes(data)
    assert once(client, renamed, lambda model: ask(client, model)).cache_hit_kind == "cold"


@pytest.mark.parametrize("mode", ["safe", "gguf_chunked"])
def test_a_fingerprint_that_is_given_is_checked(client: Client, dense: Path, mode: str) -> None:
    """A wrong one is refused with both; the right one is taken, as bytes and as hexadecimal digits."""
    right = once(client, dense, lambda model: client.model_info(model).fingerprint, fingerprint_mode=mode)
    assert (right == hashlib.sha256(dense.read_bytes()).digest()) == (mode == "safe")
    with pytest.raises(BadModel, match=right.hex()):
        tiny(client, dense, fingerprint=bytes(32), fingerprint_mode=mode)
    once(client, dense, lambda model: None, fingerprint=right.hex(), fingerprint_mode=mode)


def test_fast_unsafe_takes_the_callers_word(client: Client, dense: Path) -> None:
    """The given fingerprint is the model's, whatever the file holds."""
    look = once(
        client, dense, lambda model: client.model_info(model).fingerprint, fingerprint=b"\7" * 32,
        fingerprint_mode="fast_unsafe",
    )  # fmt: skip
    assert look == b"\7" * 32


def test_the_quantisation_is_the_files(client: Client, dense: Path) -> None:
    """It is read from the file; a given one has to agree."""
    info = once(client, dense, client.model_info, quant_type="f32", quant_bits=32)
    assert (info.quant_type, info.quant_bits) == ("f32", 32)
    for wrong in ({"quant_type": "q8_0"}, {"quant_bits": 4}):
        with pytest.raises(BadModel, match=next(iter(wrong))):
            tiny(client, dense, **wrong)


@pytest.mark.parametrize(
    "changed",
    [
        {"context_opts": {"type_k": "q8_0"}},
        {"context_opts": {"n_ctx": 1024}},
        {"context_opts": {"n_batch": 64}},
        {"context_opts": {"flash_attn": False}},
        {"context_opts": {"rope_freq_base": 20_000.0}},
        {"ctx_params_hash": bytes(32)},
    ],
    ids=lambda changed: str(changed),
)  # fmt: skip
def test_other_context_parameters_are_another_namespace(client: Client, dense: Path, changed: dict[str, Any]) -> None:
    """State of one kind of context is never offered to another, and is there again for its own."""
    once(client, dense, lambda model: saved(client, ask(client, model)))
    assert once(client, dense, lambda model: ask(client, model), **changed).cache_hit_kind == "cold"
    assert once(client, dense, lambda model: ask(client, model)).cache_hit_kind == "exact"


# --- the context


def test_the_context_bounds_a_request(client: Client, dense: Path) -> None:
    """context_size is n_ctx: a longer prompt is refused with both numbers, a hopeless text before it is tokenised."""
    model = client.load_model(dense, context_size=300, policy=POLICY)
    assert client.model_info(model).context_size == 300
    with pytest.raises(ContextOverflow, match=r"301.*300"):
        client.complete(model, [5] * 301)
    with pytest.raises(ContextOverflow, match=r"9000 bytes.*300"):
        client.complete(model, "a" * 9000)
    assert client.complete(model, [5] * 299).completion_tokens == 1
    client.unload(model)
    with pytest.raises(InvalidArgument, match="context_size"):
        tiny(client, dense, context_size=300, context_opts={"n_ctx": 301})


def test_sequences_up_to_llamas_own_limit(client: Client, dense: Path) -> None:
    """254 requests at once are possible; more is an error that says why."""
    opts = {"n_seq_max": 254, "n_ctx": 2048}
    assert once(client, dense, lambda m: client.model_info(m).available_seqs, context_opts=opts) == 254
    with pytest.raises(InvalidArgument, match=r"n_seq_max = 255 .*256 sequences"):
        tiny(client, dense, context_opts={"n_seq_max": 255})


@pytest.mark.parametrize(
    ("type_k", "type_v", "flash_attn"),
    [
        ("f32", "f32", False), ("bf16", "bf16", "auto"), ("q8_0", "q8_0", "auto"), ("q4_0", "q5_1", True), ("q5_0", "f16", False),
    ],
)  # fmt: skip
def test_types_of_cells(client: Client, dense: Path, type_k: str, type_v: str, flash_attn: Any) -> None:
    """Each pair that llama.cpp has answers, from a cold start and from what was saved, and takes the room that was estimated."""
    opts = {"type_k": type_k, "type_v": type_v, "flash_attn": flash_attn}
    model = tiny(client, dense, context_opts=opts)
    cold = saved(client, ask(client, model))
    client.complete(model, [9, 8, 7], response_tokens=0)  # takes the only sequence
    assert ask(client, model).generated == cold.generated
    took = client.model_info(model).memory_bytes["kv"]
    client.unload(model)
    wanted = client.estimate(dense, context_opts={"n_ctx": 512, "n_batch": 128} | opts)["kv"]
    assert took == pytest.approx(wanted, rel=0.05, abs=20_000)


def test_an_impossible_pair_of_cells_is_an_error(client: Client, dense: Path) -> None:
    """Quantised values need flash attention."""
    with pytest.raises(InvalidArgument, match=r"type_v.*flash_attn"):
        tiny(client, dense, context_opts={"type_v": "q8_0", "flash_attn": False})


def test_threads_are_shared_by_the_models_that_compute(client: Client) -> None:
    """Alone a model uses what its options say; two that compute share the cores; given threads are an upper bound."""
    opts = {"n_ctx": 100_000}
    two = [client.load_model("any", backend="stub", model_opts={"step_ms": 5}, context_opts=opts) for _ in range(2)]

    def threads() -> list[int]:
        return [client.model_info(model).threads for model in two]

    assert threads() == [usable_cores()] * 2
    with client.stream(two[0], "1 2"), client.stream(two[1], "1 2"):
        wait_for(lambda: threads() == [max(1, usable_cores() // 2)] * 2, "the cores are shared")
    wait_for(lambda: threads() == [usable_cores()] * 2, "each has all of them again")
    assert client.status()["cores"] == usable_cores()
    for model in two:
        client.unload(model)


def test_writers_are_nice(client: Client) -> None:
    """What saves to files leaves the cores to what decodes; what answers does not."""
    processes = client.processes()
    nice = {name: os.getpriority(os.PRIO_PROCESS, pid) for name, pid in processes.items()}
    own = os.getpriority(os.PRIO_PROCESS, 0)  # whoever runs these tests may be nice too
    assert (nice["writer:0"], nice["pressure"]) == (19, 19)
    assert (nice["router"], nice["index"], nice["model:auto"]) == (own, own, own)


# --- the weights


def test_weights_are_mapped_or_read(client: Client, dense: Path) -> None:
    """use_mmap decides whether the file is mapped; prefetch = false tells the kernel to read pages when they are used."""

    def look(model: str) -> list[str]:
        return flags_of_mapping(client.processes()[f"model:{model}"], dense)

    assert once(client, dense, look, model_opts={"use_mmap": False}) == []
    mapped = once(client, dense, look)
    lazily = once(client, dense, look, model_opts={"prefetch": False})
    assert mapped
    assert not any(" rr" in flags for flags in mapped)
    assert all(" rr" in flags for flags in lazily)


def test_weights_are_locked(client: Client, dense: Path) -> None:
    """use_mlock locks the weights at load, pin_resident_after_first_request once a request has ended."""

    def locked(model: str) -> int:
        return locked_bytes(client.processes()[f"model:{model}"])

    assert once(client, dense, locked) == 0
    assert once(client, dense, locked, model_opts={"use_mlock": True}) > 400_000
    model = tiny(client, dense, model_opts={"pin_resident_after_first_request": True})
    assert locked(model) == 0
    ask(client, model)
    wait_for(lambda: locked(model) > 400_000, "the pages are locked")
    client.unload(model)


def test_gpu_options_are_taken_without_a_gpu(client: Client, dense: Path) -> None:
    """They change nothing where there is none; a value that is no such option is refused by name."""
    plain = once(client, dense, lambda model: ask(client, model).generated)
    for opts in (
        {"n_gpu_layers": 99},
        {"split_mode": "none", "main_gpu": 0},
        {"split_mode": "row", "tensor_split": [1, 3]},
    ):
        assert once(client, dense, lambda model: ask(client, model).generated, model_opts=opts) == plain
    for key, value in {"split_mode": "diagonal", "main_gpu": -1, "tensor_split": [1] * 17, "use_mmap": "maybe"}.items():
        with pytest.raises(InvalidArgument, match=f"model_opts.{key}"):
            tiny(client, dense, model_opts={key: value})


def test_a_tokenizer_alone(client: Client, dense: Path) -> None:
    """vocab_only tokenizes, takes no memory for weights, and refuses everything that computes."""
    model = tiny(client, dense, model_opts={"vocab_only": True})
    assert client.detokenize(model, client.tokenize(model, "hello", add_special=False)) == b"hello"
    assert sum(client.model_info(model).memory_bytes.values()) == 0
    for refused in (client.complete, client.prefill_only, client.embed):
        with pytest.raises(NotSupported, match="vocab_only"):
            refused(model, "hello")
    client.unload(model)


def test_a_model_that_only_embeds(client: Client, tmp_path: Path) -> None:
    """It embeds, the same text alike and others not; it generates nothing, and says so."""
    write_embedding_model(tmp_path / "encoder.gguf")
    model = tiny(client, tmp_path / "encoder.gguf")
    assert client.embed(model, "abc") == client.embed(model, "abc") != client.embed(model, "xyz")
    with pytest.raises(NotSupported, match="embeddings"):
        client.complete(model, "hello")
    client.unload(model)


def test_a_model_without_a_chat_template(client: Client, dense: Path) -> None:
    """It completes; a chat is refused."""
    dense.write_bytes(dense.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_nothings"))
    model = tiny(client, dense)
    assert ask(client, model).completion_tokens
    with pytest.raises(NotSupported, match="chat template"):
        client.chat(model, [{"role": "user", "content": "hello"}])
    client.unload(model)


ODD_NAMES = ["模型 é/mo del.gguf", "two\nlines.gguf", "-o'\"$HOME %s.gguf", "no UTF-8 \udcff\udc80%FF.gguf"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_any_path(client: Client, dense: Path, name: str) -> None:
    """A path is bytes to us: whatever a file is called, it loads and answers, also after its process has died."""
    path = dense.parent / name
    path.parent.mkdir(exist_ok=True)
    with pytest.raises(BadModel, match="No such file") as missing:
        tiny(client, path)
    missing.value.message.encode()  # it can be printed
    shutil.copy(dense, path)
    model = tiny(client, path)
    os.kill(client.processes()[f"model:{model}"], signal.SIGKILL)
    assert ask(client, model).completion_tokens
    client.unload(model)
    assert client.estimate(path)["weights"] > 0


def test_a_path_from_where_one_stands(client: Client, dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is from the caller's directory, not the runtime's; a link is what it leads to."""
    monkeypatch.chdir(dense.parent)
    Path("link.gguf").symlink_to(dense.name)
    found = [once(client, Path(name), client.model_info) for name in ("dense.gguf", "./link.gguf")]
    assert {info.fingerprint for info in found} == {hashlib.sha256(dense.read_bytes()).digest()}


def test_a_path_as_a_uri(client: Client, dense: Path) -> None:
    """A file URI is a path too, one that can be written into a configuration whatever its bytes are."""
    uri = dense.as_uri().replace("dense", "%64ense")
    assert client.load_model(uri, "by-uri") == "by-uri"
    client.unload("by-uri")
    with pytest.raises(NotFound, match="neither a file nor a name"):
        client.load_model("file:dense", backend="llama")


def test_a_split_model(client: Client, dense: Path) -> None:
    """It answers as the same model in one file does; a change in any part is a change of the model."""
    write_model("dense", dense)
    plain = once(client, dense, lambda model: ask(client, model))
    write_model("dense", dense, tensors_per_file=10)
    parts = sorted(dense.parent.glob("dense-*.gguf"))
    assert len(parts) > 2
    first = once(client, parts[0], lambda model: (saved(client, ask(client, model)), client.model_info(model)))
    assert (first[0].cache_hit_kind, first[0].generated) == ("cold", plain.generated)
    assert once(client, parts[0], lambda model: ask(client, model)).cache_hit_kind == "exact"
    digests = b"".join(hashlib.sha256(part.read_bytes()).digest() for part in parts)
    assert first[1].fingerprint == hashlib.sha256(digests).digest()
    assert first[1].memory_bytes["weights"] == once(client, dense, client.model_info).memory_bytes["weights"]
    data = bytearray(parts[-1].read_bytes())
    data[-1] ^= 1
    parts[-1].write_bytes(data)
    assert once(client, parts[0], lambda model: ask(client, model)).cache_hit_kind == "cold"


# --- where saves go


def test_saves_go_to_the_tier_that_was_named(client: Client, dense: Path) -> None:
    """tier_srv chooses among servers of a kind; a pair that does not match is an error at load."""
    model = tiny(client, dense, tier="disk", tier_srv="archive")
    saved(client, ask(client, model))
    stored = {one.server: one.stored_bytes for one in client.cache.stats().tiers}
    assert stored["tier:archive"] > 0 == stored["tier:disk"]
    client.unload(model)
    for tier, server, key in (("disk", "ram", "tier_srv"), ("ram_file", None, "tier"), ("ram", "unheard", "tier_srv")):
        with pytest.raises(InvalidArgument, match=key):
            tiny(client, dense, tier=tier, tier_srv=server)


def test_a_policy_of_its_own(client: Client, dense: Path) -> None:
    """Gates that are given count for this model only; a bad one is named."""
    model = client.load_model(dense, policy={"min_tokens": float("inf")}, context_opts={"n_threads": 1})
    assert ask(client, model).finish_key is None
    client.unload(model)
    with pytest.raises(InvalidArgument, match="continued_interval"):
        client.load_model(dense, policy={"continued_interval": 0})


# --- the rest


def test_markers_of_ones_own(client: Client, dense: Path) -> None:
    """What stands between the markers of a model's options is told apart, wherever its tokens end."""
    model = tiny(client, dense, thinking_markers=["<why>", "</why>"], tool_call_markers={"start": "[[", "end": "]]"})
    grammar = 'root ::= "<why>so</why>yes[[{}]]no"'
    with client.stream(model, "x", grammar=grammar, thinking=True) as stream:
        events = list(stream)
    seen = [(event.kind, event.text) for event in events if event.kind != "done"]
    texts = {kind: "".join(text for its, text in seen if its == kind) for kind, _ in seen}
    assert list(texts) == ["thinking", "thinking_end", "token", "tool_call", "tool_call_end"]
    assert (texts["thinking"], texts["token"], texts["tool_call"]) == ("so", "yesno", "{}")
    client.unload(model)


def test_grammars_are_bounded_by_the_configuration(client: Client, dense: Path) -> None:
    """A grammar longer than limits.grammar_bytes is refused; a shorter one is followed."""
    model = tiny(client, dense)
    assert client.complete(model, "x", grammar='root ::= "yes"').reply == "yes"
    with pytest.raises(BarrelError, match="2000") as refused:
        client.complete(model, "x", grammar='root ::= "' + "y" * 3000 + '"')
    assert refused.value.code in ("invalid_argument", "grammar_failed")
    client.unload(model)


def test_progress_and_log(client: Client, runtime: Runtime, dense: Path) -> None:
    """A load tells how far it is, forwards only; what llama.cpp says is in the log at debug level."""
    told: list[float] = []
    model = client.load_model(dense, "logged", on_progress=told.append, context_opts={"n_ctx": 8192})
    assert told == sorted(told)
    assert told[-1] == 1.0
    text = (Path(runtime.settings.runtime.state_dir) / "log" / "model:logged.log").read_text()
    assert '"llama.said"' in text
    assert "4096 tokens it was trained on" in text
    client.unload(model)
