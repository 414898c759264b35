"""What only the llama.cpp engine has to promise: files, grammars, windows, adapters, keys, the real model."""

import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as L
import pytest

from barrel_inference.errors import BadModel, BarrelError, ContextOverflow, GrammarFailed, InvalidArgument, NotSupported
from barrel_inference.protocol import Sampling
from barrel_inference.workers.model.engine import Row
from barrel_inference.workers.model.engine_llama import LlamaEngine
from tests.model.engines import NODE, Maker, clear_all, feed, prompt_of, restore, save
from tests.model.tiny_gguf import (
    FIRST_BYTE_TOKEN,
    TOKEN_ID,
    VOCABULARY,
    WINDOW,
    write_adapter,
    write_embedding_model,
    write_model,
)

Make = Callable[..., LlamaEngine]


@pytest.fixture
def make(tiny_models: Mapping[str, Path], packaged_settings: dict[str, Any], tmp_path: Path) -> Iterator[Make]:
    """Makes engines by kind of tiny model or by path, and closes them at the end."""
    made: list[LlamaEngine] = []

    def make_one(which: str = "dense", *, model_opts: dict[str, Any] | None = None, **context: Any) -> LlamaEngine:
        maker = Maker("llama", str(tiny_models.get(which, which)), tmp_path, packaged_settings)
        engine = maker(model_opts=model_opts, **context)
        assert isinstance(engine, LlamaEngine)
        made.append(engine)
        return engine

    yield make_one
    for engine in made:
        engine.close()


def generate(
    engine: LlamaEngine, sampling: Sampling, *, count: int, seed: int = 1, prompt: list[int] | None = None
) -> list[int]:
    """Generated tokens up to the end token or `count`, in sequence 0, which is emptied before."""
    tokens = prompt or prompt_of(1, 20)
    engine.clear(0)
    feed(engine, 0, tokens)
    sampler = engine.new_sampler(sampling, seed=seed, prompt=tokens)
    out: list[int] = []
    try:
        while len(out) < count:
            token = sampler.sample(engine.logits(0), len(out))
            out.append(token)
            if engine.is_end(token):
                break
            engine.decode([Row(token, len(tokens) + len(out) - 1, 0, True)])
    finally:
        sampler.close()
    return out


# --- files


def test_what_cannot_be_loaded_says_why(make: Make, tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    """A missing file, a directory, an empty, a foreign and a truncated file are bad models with their own reasons."""
    empty, text, cut, part = (
        tmp_path / name for name in ("empty.gguf", "text.gguf", "cut.gguf", "m-00002-of-00002.gguf")
    )
    empty.touch()
    text.write_text("hello")
    cut.write_bytes(tiny_models["dense"].read_bytes()[:-100_000])
    part.write_bytes(tiny_models["dense"].read_bytes())
    for path, said in (
        (tmp_path / "none.gguf", "No such file"),
        (tmp_path, "directory"),
        (empty, "is empty"),
        (text, "no GGUF"),
        (cut, "not within"),
        (part, "first part"),
        (Path("pkg:no-such-distribution-here"), "no distribution"),
    ):
        with pytest.raises(BadModel, match=said):
            make(str(path))


def test_a_corrupt_header_gives_llamas_own_reason(make: Make, tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    """llama.cpp's error lines are the text of the error."""
    damaged = tmp_path / "damaged.gguf"
    data = bytearray(tiny_models["dense"].read_bytes())
    data[4:8] = (99).to_bytes(4, "little")  # the version
    damaged.write_bytes(data)
    with pytest.raises(BadModel, match="version"):
        make(str(damaged))


@pytest.mark.parametrize("name", ["模型 é.gguf", "a\nb.gguf", os.fsdecode(b"\xff\xfe.gguf")])
def test_any_path_loads(make: Make, tiny_models: Mapping[str, Path], tmp_path: Path, name: str) -> None:
    """Blanks, foreign letters, newlines and bytes that are no text."""
    path = tmp_path / name
    shutil.copy(tiny_models["dense"], path)
    assert make(str(path)).info.n_vocab == len(VOCABULARY)


@pytest.mark.parametrize(
    "model_opts",
    [{"use_mmap": False}, {"use_mlock": True}, {"prefetch": False}, {"n_gpu_layers": 99, "split_mode": "none"}],
)
def test_ways_of_loading_do_not_change_the_answer(make: Make, model_opts: dict[str, Any]) -> None:
    """The same logits, however the weights come into memory."""
    want = feed(make(), 0, prompt_of(1, 30))
    assert feed(make(model_opts=model_opts), 0, prompt_of(1, 30)) == want


def test_resident_pages_can_be_pinned(make: Make) -> None:
    """After a request some of the weights are in memory and are locked, as far as this process may."""
    assert make(model_opts={"use_mmap": False}).pin_resident() == 0  # nothing is mapped
    engine = make()
    feed(engine, 0, prompt_of(1, 30))
    assert engine.pin_resident() >= 0


def test_progress_goes_from_nothing_to_one(
    tiny_models: Mapping[str, Path], packaged_settings: dict[str, Any], tmp_path: Path
) -> None:
    """Fractions never fall, and the last one is 1."""
    from barrel_inference.workers.model import llama_open
    from barrel_inference.workers.model.options import parse

    told: list[float] = []
    options = parse({"model_path": str(tiny_models["dense"]), "context_opts": {"n_threads": 1}}, packaged_settings)
    llama_open.load(options, state_dir=tmp_path, on_progress=told.append).close()
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_a_tokenizer_alone_computes_nothing(make: Make) -> None:
    """`vocab_only` tokenizes, and refuses everything else with a reason."""
    engine = make(model_opts={"vocab_only": True})
    assert engine.info.vocab_only
    assert not engine.info.cacheable
    assert engine.tokenize(b"ab", add_special=False, parse_special=False)
    with pytest.raises(NotSupported, match="vocab_only"):
        engine.decode([Row(5, 0, 0, True)])
    with pytest.raises(NotSupported, match="vocab_only"):
        engine.new_sampler(Sampling(), seed=1, prompt=[])
    with pytest.raises(NotSupported, match="vocab_only"):
        engine.embed([5])
    with pytest.raises(NotSupported, match="vocab_only"):
        engine.set_adapters([("x", 1.0)])


def test_as_many_sequences_as_llama_has(make: Make) -> None:
    """254 sequences and two helpers are the 256 ids of llama.cpp."""
    engine = make(n_seq_max=254, n_ctx=64, kv_cells=1024)
    want = feed(engine, 253, prompt_of(1, 20))
    clear_all(engine)
    assert feed(engine, 0, prompt_of(1, 20)) == want


# --- vocabulary and keys


def test_text_cannot_spell_a_control_token(make: Make) -> None:
    """The rendered bytes of the control token and of its spelt-out text differ, and no plain byte makes them equal."""
    engine = make()
    control = engine.tokenize(b"<|im_start|>", add_special=False, parse_special=True)
    spelt = engine.tokenize(b"<|im_start|>", add_special=False, parse_special=False)
    assert control == [TOKEN_ID["<|im_start|>"]]
    assert len(spelt) > 1

    def render(tokens: list[int]) -> bytes:
        return b"".join(map(engine.rendered, tokens))

    assert render(spelt) == b"<|im_start|>"
    assert render(control) != render(spelt)
    forged = engine.tokenize(render(control), add_special=False, parse_special=False)
    assert render(forged) != render(control)


def test_every_token_shows_in_the_key(make: Make) -> None:
    """No token renders as nothing, or a prompt with it would have the key of one without."""
    engine = make()
    assert all(engine.rendered(token) for token in range(engine.info.n_vocab))
    controls = {engine.rendered(TOKEN_ID[text]) for text in ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")}
    assert len(controls) == 5


def test_user_defined_tokens_are_text(make: Make) -> None:
    """The tokenizer finds them in any text, so they render as they are spelt."""
    engine = make()
    assert engine.tokenize(b"<tool>", add_special=False, parse_special=False) == [TOKEN_ID["<tool>"]]
    assert engine.rendered(TOKEN_ID["<tool>"]) == b"<tool>"


def test_control_tokens_are_shown_only_when_asked(make: Make) -> None:
    """`piece` hides them, `special_piece` spells them."""
    engine = make()
    token = TOKEN_ID["<|im_end|>"]
    assert (engine.piece(token), engine.special_piece(token)) == (b"", b"<|im_end|>")
    assert engine.is_end(token)
    assert (engine.info.bos_text, engine.info.eos_text) == ("<s>", "<|im_end|>")


@pytest.mark.parametrize("text", ["plain", "the é 日本 🙂", "line\n\ttab", ""])
def test_any_text_survives(make: Make, text: str) -> None:
    """The pieces of a text's tokens are the text."""
    engine = make()
    tokens = engine.tokenize(text.encode(), add_special=False, parse_special=False)
    assert b"".join(map(engine.piece, tokens)) == text.encode()


def test_any_bytes_survive(make: Make) -> None:
    """A vocabulary with byte tokens keeps bytes that are no text; escaping keeps them distinct in keys."""
    engine = make()
    data = bytes(range(256)) + b"\xff\x01\xff\x00\xf8\x88\xed\xa0\x80"
    tokens = engine.tokenize(data, add_special=False, parse_special=False)
    assert b"".join(map(engine.piece, tokens)) == data
    assert engine.rendered(FIRST_BYTE_TOKEN + 0xFF) == b"\xff\x00"


@pytest.mark.parametrize("token", [-1, len(VOCABULARY), 2**31])
def test_ids_outside_the_vocabulary_are_refused(make: Make, token: int) -> None:
    """llama.cpp would read beyond its tables."""
    engine = make()
    for ask in (engine.piece, engine.special_piece, engine.rendered):
        with pytest.raises(InvalidArgument, match=str(token)):
            ask(token)
    assert not engine.is_end(token)


def test_no_piece_is_longer_than_said(make: Make) -> None:
    """`longest_piece_bytes` bounds what a number of tokens can hold."""
    engine = make()
    longest = max(len(engine.special_piece(token)) for token in range(engine.info.n_vocab))
    assert longest <= engine.longest_piece_bytes() < 100


# --- namespaces


@pytest.mark.parametrize(
    "context",
    [
        {"kv_cells": 1024},
        {"n_batch": 64},
        {"n_ubatch": 64},
        {"type_k": "q8_0"},
        {"type_v": "q8_0", "flash_attn": True},
        {"type_k": "f32"},
        {"flash_attn": False},
        {"deterministic": True},
        {"rope_freq_base": 5000.0},
        {"rope_freq_scale": 0.5},
        {"rope_scaling": "linear"},
        {"yarn_ext_factor": 0.5},
        {"yarn_orig_ctx": 128},
        {"swa_full": False},
    ],
)
def test_whatever_changes_the_state_changes_the_namespace(make: Make, context: dict[str, Any]) -> None:
    """Contexts that would misread each other's state have different hashes."""
    assert make(**context).info.ctx_params_hash != make().info.ctx_params_hash


@pytest.mark.parametrize(
    "context", [{}, {"n_seq_max": 1}, {"n_threads": 2}, {"warm_cells": 0}, {"decode_budget_ms": 5000}]
)
def test_what_does_not_change_the_state_keeps_the_namespace(make: Make, context: dict[str, Any]) -> None:
    """A restart with more sequences or threads still finds everything."""
    assert make(**context).info.ctx_params_hash == make().info.ctx_params_hash


def test_state_of_another_layout_is_refused(make: Make) -> None:
    """Even under a supplied hash, cells of another type or V layout are not taken."""
    plain, other = make(flash_attn=True), make(type_k="f32", flash_attn=True)
    feed(plain, 0, prompt_of(1, NODE))
    assert not restore(other, 0, save(plain, 0, NODE))
    feed(other, 0, prompt_of(1, NODE))


# --- sliding windows


def with_holes(engine: LlamaEngine, prompt: list[int]) -> None:
    """`prompt` in sequence 0, after neighbours have taken those of its cells that its window had passed."""
    noise = prompt_of(9, 400)
    feed(engine, 1, noise[:WINDOW])  # a short neighbour makes the free cells begin before ours
    feed(engine, 0, prompt)
    engine.clear(1)
    feed(engine, 1, noise)
    engine.clear(1)


def test_lost_window_cells_are_noticed(make: Make) -> None:
    """Where older cells were taken, nothing is exported, cut or shared; the end goes on exactly."""
    engine = make("window", n_ctx=512, n_batch=128)
    prompt = prompt_of(1, 3 * WINDOW + 5)
    want = feed(engine, 0, [*prompt, 7])
    clear_all(engine)
    with_holes(engine, prompt)
    lost = [start for start in range(0, len(prompt) - NODE, NODE) if engine.cells_bytes(0, start, start + NODE) < 0]
    assert lost, "the neighbours took nothing: this test tests nothing"
    assert not engine.can_cut(0, WINDOW)
    assert not engine.cut(0, WINDOW)
    assert not engine.share(0, 2, WINDOW)
    target = bytearray(10_000)
    assert not engine.export_cells(0, lost[0], lost[0] + NODE, memoryview(target))
    assert engine.can_cut(0, len(prompt))
    got = dict(feed(engine, 0, [*prompt, 7], len(prompt)))
    assert all(abs(got[token] - value) < 2e-2 for token, value in want)


def test_a_second_owner_keeps_window_cells(make: Make) -> None:
    """Cells that two sequences share are never taken, so a shared prefix can be cut."""
    engine = make("window", n_ctx=512, n_batch=128)
    prompt = prompt_of(1, 3 * WINDOW + 5)
    feed(engine, 0, prompt)
    assert engine.share(0, 3, len(prompt))
    feed(engine, 1, prompt_of(9, 300))
    assert engine.can_cut(0, WINDOW)


def test_nodes_longer_than_the_window_are_refused(make: Make) -> None:
    """A saved state leaves out cells that the window has passed within it."""
    engine = make("window")
    feed(engine, 0, prompt_of(1, 3 * WINDOW))
    assert engine.info.window_tokens == WINDOW
    assert engine.cells_bytes(0, 0, WINDOW) > 0
    assert engine.cells_bytes(0, 0, WINDOW + 1) == -1


# --- buffers


def test_state_goes_through_mapped_memory(make: Make) -> None:
    """Exported into a shared mapping and imported from it; the mapping can be closed at once, so nothing holds on to it."""
    engine = make()
    prompt = prompt_of(1, NODE + 20)
    feed(engine, 0, prompt[:NODE])
    size = engine.cells_bytes(0, 0, NODE)
    want = feed(engine, 0, prompt, NODE)
    clear_all(engine)
    feed(engine, 0, prompt[:NODE])
    arena = mmap.mmap(-1, size + 64)
    view = memoryview(arena)
    with view[64 : 64 + size] as target:
        assert engine.export_cells(0, 0, NODE, target)
    clear_all(engine)
    with view.toreadonly()[64 : 64 + size] as source:
        assert engine.import_cells(0, 0, NODE, source)
    view.release()
    arena.close()
    assert feed(engine, 0, prompt, NODE) == want


def test_stale_logits_cannot_be_read(make: Make) -> None:
    """After a call that failed, and for rows that asked for none, there are no logits; llama.cpp would hand out old ones."""
    engine = make()
    feed(engine, 0, prompt_of(1, 20))
    with pytest.raises(AssertionError):
        engine.logits(1)
    with pytest.raises(Exception, match="-1"):
        engine.decode([Row(len(VOCABULARY) + 5, 20, 0, True)])
    with pytest.raises(AssertionError):
        engine.logits(0)


# --- choosing


def text_of(engine: LlamaEngine, tokens: list[int]) -> bytes:
    """What the tokens show."""
    return b"".join(map(engine.piece, tokens))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_is_followed_to_its_end(make: Make, temperature: float) -> None:
    """The text is one of the grammar's, and then the reply ends."""
    engine = make()
    got = generate(engine, Sampling(grammar='root ::= "yes, " ("one" | "two")', temperature=temperature), count=30)
    assert text_of(engine, got) in (b"yes, one", b"yes, two")
    assert engine.is_end(got[-1])


def test_a_json_schema_is_followed(make: Make) -> None:
    """The reply is JSON of the schema."""
    import json

    engine = make()
    schema = '{"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}'
    got = generate(engine, Sampling(json_schema=schema), count=60)
    assert isinstance(json.loads(text_of(engine, got))["on"], bool)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_dead_end_fails_the_request_only(make: Make, temperature: float) -> None:
    """When nothing that the grammar allows can be chosen, it says so, and the engine goes on."""
    engine = make()
    blocked = {token: float("-inf") for token in range(len(VOCABULARY)) if engine.special_piece(token).startswith(b"y")}
    with pytest.raises(GrammarFailed, match="allows none"):
        generate(engine, Sampling(grammar='root ::= "y"', logit_bias=blocked, temperature=temperature), count=3)
    assert len(generate(engine, Sampling(), count=3)) == 3


def test_a_forbidden_token_is_not_accepted(make: Make) -> None:
    """A resubmission whose tokens the grammar forbids fails; llama.cpp would end the process."""
    engine = make()
    sampler = engine.new_sampler(Sampling(grammar='root ::= "a"'), seed=1, prompt=[])
    with pytest.raises(GrammarFailed):
        sampler.accept(FIRST_BYTE_TOKEN + ord("b"), 0)
    sampler.accept(FIRST_BYTE_TOKEN + ord("a"), 0)
    sampler.close()


@pytest.mark.parametrize("grammar", ['root ::= "a', 'other ::= "a"', "root ::= nothing", 'root ::= root "a"'])
def test_a_grammar_that_does_not_compile_is_refused(make: Make, grammar: str) -> None:
    """Unfinished, without a root, with an unknown rule, left-recursive."""
    with pytest.raises(GrammarFailed, match="does not compile"):
        make().new_sampler(Sampling(grammar=grammar), seed=1, prompt=[])


def test_grammars_do_not_share_their_state(make: Make) -> None:
    """A compiled grammar is used again from its beginning, and many of them replace each other."""
    engine = make()
    first = generate(engine, Sampling(grammar='root ::= "ab"'), count=5)
    for number in range(30):
        generate(engine, Sampling(grammar=f'root ::= "{number}"'), count=5)
    assert generate(engine, Sampling(grammar='root ::= "ab"'), count=5) == first
    assert text_of(engine, first) == b"ab"


def test_penalties_look_into_the_prompt(make: Make) -> None:
    """A token of the prompt is pushed away from the first place."""
    engine = make()
    likeliest = generate(engine, Sampling(), count=1)[0]
    prompt = [*prompt_of(1, 19), likeliest]
    engine.clear(0)
    plain = feed(engine, 0, prompt)
    again = engine.new_sampler(Sampling(repetition_penalty=1.5), seed=1, prompt=[plain[0][0]])
    assert again.sample(engine.logits(0), 0) != plain[0][0]
    again.close()


def test_biases_decide(make: Make) -> None:
    """A biased token comes, a token outside the vocabulary is no matter."""
    engine = make()
    assert generate(engine, Sampling(logit_bias={42: 100.0, 10**6: 5.0}), count=2) == [42, 42]


def test_filters_narrow_the_draw(make: Make) -> None:
    """With one candidate left, by any of the filters, a hot draw is greedy."""
    engine = make()
    greedy = generate(engine, Sampling(), count=8)
    for only_one in (
        Sampling(temperature=2.0, top_k=1),
        Sampling(temperature=2.0, top_p=1e-6),
        Sampling(temperature=2.0, min_p=1.0),
        Sampling(temperature=1e-9),
    ):
        assert generate(engine, only_one, count=8) == greedy


def test_a_replayed_request_goes_on_as_it_would_have(make: Make) -> None:
    """Tokens accepted by a new sampler leave it where the old one was: penalties, grammar and draws."""
    engine = make()
    sampling = Sampling(temperature=0.9, repetition_penalty=1.2, grammar="root ::= [a-z]{20,40}")
    whole = generate(engine, sampling, count=12, seed=7)
    prompt = prompt_of(1, 20)
    engine.clear(0)
    feed(engine, 0, prompt)
    sampler = engine.new_sampler(sampling, seed=7, prompt=prompt)
    for number, token in enumerate(whole[:6]):
        sampler.accept(token, number)
        engine.decode([Row(token, 20 + number, 0, True)])
    assert sampler.sample(engine.logits(0), 6) == whole[6]
    sampler.close()


def test_seeds_matter_and_repeat(make: Make) -> None:
    """One seed gives one text, another seed another."""
    engine = make()
    hot = Sampling(temperature=0.9)
    assert generate(engine, hot, count=12, seed=42) == generate(engine, hot, count=12, seed=42)
    assert generate(engine, hot, count=12, seed=42) != generate(engine, hot, count=12, seed=99)


# --- adapters and embeddings


def test_adapters_change_answers_and_fingerprint(make: Make, tiny_adapters: list[Path]) -> None:
    """Each adapter and scale has logits and a fingerprint of its own; without any, everything is as before."""
    engine = make()
    first, second = map(str, tiny_adapters)
    prompt = prompt_of(1, 30)

    def under(*adapters: tuple[str, float]) -> tuple[bytes, object]:
        mark = engine.set_adapters(adapters)
        engine.clear(0)
        return mark, feed(engine, 0, prompt)

    plain = under()
    seen = [plain, under((first, 1.0)), under((first, 0.5)), under((second, 1.0)), under((first, 1.0), (second, 1.0))]
    assert len({mark for mark, _ in seen}) == len(seen)
    assert all(logits != plain[1] for _, logits in seen[1:])
    assert under((second, 1.0), (first, 1.0)) == seen[4]  # the order does not matter
    assert under((first, 1.0)) == seen[1]
    assert under() == plain
    assert plain[0] == engine.info.fingerprint


def test_a_replaced_adapter_is_another_one(make: Make, tmp_path: Path) -> None:
    """The content counts, not the name."""
    engine = make()
    path = tmp_path / "adapter.gguf"
    write_adapter(path, seed=1)
    before = engine.set_adapters([(str(path), 1.0)])
    path.unlink()
    write_adapter(path, seed=5)
    assert engine.set_adapters([(str(path), 1.0)]) != before


def test_an_adapter_that_does_not_fit_changes_nothing(make: Make, tiny_adapters: list[Path], tmp_path: Path) -> None:
    """A missing or foreign file is refused, and the former adapters stay."""
    engine = make()
    mark = engine.set_adapters([(str(tiny_adapters[0]), 1.0)])
    prompt = prompt_of(1, 30)
    want = feed(engine, 0, prompt)
    whole_model = tmp_path / "model.gguf"
    write_model("dense", whole_model)
    for path in (tmp_path / "none.gguf", whole_model):
        with pytest.raises(BadModel, match="adapter"):
            engine.set_adapters([(str(path), 1.0)])
    engine.clear(0)
    assert feed(engine, 0, prompt) == want
    assert engine.set_adapters([(str(tiny_adapters[0]), 1.0)]) == mark


def test_embeddings_have_length_one_and_a_limit(make: Make) -> None:
    """They are normalised; empty and over-long texts are refused with the numbers."""
    engine = make(n_ctx=100)
    assert sum(value * value for value in engine.embed(prompt_of(1, 100))) == pytest.approx(1)
    with pytest.raises(InvalidArgument, match="empty"):
        engine.embed([])
    with pytest.raises(ContextOverflow, match=r"101 .* 100"):
        engine.embed(prompt_of(1, 101))
    with pytest.raises(InvalidArgument, match="vocabulary"):
        engine.embed([5, 10**6])


def test_an_embedding_model_embeds_and_nothing_else(make: Make, tmp_path: Path) -> None:
    """A model that looks at whole texts has no sequences; asked to generate, it says what it is."""
    path = tmp_path / "encoder.gguf"
    write_embedding_model(path)
    engine = make(str(path))
    assert engine.info.embeddings_only
    assert not engine.info.cacheable
    one, other = (engine.tokenize(text, add_special=True, parse_special=False) for text in (b"abc def", b"xyz"))
    assert engine.embed(one) == engine.embed(one) != engine.embed(other)
    with pytest.raises(NotSupported, match="embeddings"):
        engine.decode([Row(5, 0, 0, True)])
    with pytest.raises(NotSupported, match="embeddings"):
        engine.new_sampler(Sampling(), seed=1, prompt=[])


def test_threads_follow_unless_the_context_is_deterministic(make: Make) -> None:
    """A share bounds what the options say; a deterministic context keeps its numbers, as they decide how sums are split."""
    given = {"n_threads": 3, "n_threads_batch": 4}
    for context, shared in (({}, (2, 2)), ({"deterministic": True}, (3, 4))):
        engine = make(**given, **context)
        assert threads_of(engine) == (3, 4)
        engine.set_threads(2)
        assert threads_of(engine) == shared
        feed(engine, 0, prompt_of(1, 30))
        engine.set_threads(512)
        assert threads_of(engine) == (3, 4)
    assert threads_of(make(n_threads=3)) == (3, 3)


def threads_of(engine: LlamaEngine) -> tuple[int, int]:
    """Threads for single tokens and for batches, as llama.cpp has them."""
    return L.llama_n_threads(engine._context), L.llama_n_threads_batch(engine._context)


def test_batches_are_as_large_as_the_options_say(make: Make) -> None:
    """n_ubatch follows n_batch unless it is given; what a context offers to all is kv_cells."""
    for given, batches in (({"n_batch": 64}, (64, 64)), ({"n_batch": 64, "n_ubatch": 32, "kv_cells": 1024}, (64, 32))):
        engine = make(**given)
        context = engine._context
        assert (L.llama_n_batch(context), L.llama_n_ubatch(context)) == batches
        assert L.llama_n_ctx(context) == engine.info.n_cells == given.get("kv_cells", 512)


def test_threads_that_need_all_cores_have_one_each(make: Make) -> None:
    """The thread that computes and its helpers; with fewer threads they are the kernel's to place again."""
    everywhere = os.sched_getaffinity(0)
    engine = make(n_threads=max(2, len(everywhere)))
    found: list[list[set[int]]] = []

    def compute() -> None:
        for count in (len(everywhere), 1):
            engine.set_threads(count)
            found.append([os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")])

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert found[1] == [everywhere] * len(found[1])
    bound = sorted(tuple(cores) for cores in found[0] if cores != everywhere)
    assert bound == [(core,) for core in sorted(everywhere)] or len(everywhere) == 1


# --- the real model


@pytest.fixture
def real(make: Make, smollm2: Path) -> LlamaEngine:
    """SmolLM2 with a small context."""
    return make(str(smollm2), n_ctx=1024, n_batch=256, n_seq_max=2, n_threads=2)


@pytest.mark.real
def test_the_real_model_keeps_its_promises(real: LlamaEngine) -> None:
    """What it is, a greedy reply that survives a restore bit by bit, and a grammar that it follows."""
    assert real.info.cacheable
    assert (real.info.quant_type, real.info.quant_bits) == ("q4_1", 4)
    assert real.info.chat_template
    assert real.info.memory_bytes["weights"] > 90_000_000
    assert real.info.memory_bytes["kv"] > 0
    prompt = real.tokenize(b"The quick brown fox jumps over the lazy dog. " * 8, add_special=True, parse_special=False)
    kept = len(prompt) - 10
    feed(real, 0, prompt[:kept])
    saved = save(real, 0, kept)
    want = feed(real, 0, prompt, kept)
    clear_all(real)
    assert restore(real, 1, saved)
    assert feed(real, 1, prompt, kept) == want
    clear_all(real)
    got = generate(real, Sampling(grammar='root ::= "yes" | "no"'), count=8, prompt=prompt)
    assert text_of(real, got) in (b"yes", b"no")


@pytest.mark.real
def test_rotation_is_part_of_the_namespace(make: Make, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp may rotate quantised keys and values, the state does not say so, and an environment variable decides."""
    context = {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": True, "n_ctx": 256}
    before = make(str(smollm2), **context).info.ctx_params_hash
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    assert make(str(smollm2), **context).info.ctx_params_hash != before


@pytest.mark.real
def test_bytes_that_are_no_text_do_not_end_the_process(real: LlamaEngine) -> None:
    """llama.cpp's splitter throws at some of them; they are replaced beforehand, as it replaces the others."""
    for data in (b"\xf8\x88\x80\x80\x80", b"\xf4\x90\x80\x80", b"\xed\xa0\x80", b"\xff", bytes(range(256))):
        tokens = real.tokenize(data, add_special=False, parse_special=False)
        assert "\ufffd" in b"".join(map(real.piece, tokens)).decode()


@pytest.mark.real
def test_every_real_token_shows_in_the_key(real: LlamaEngine) -> None:
    """No token of a real vocabulary renders as nothing."""
    assert all(map(real.rendered, range(real.info.n_vocab)))


def test_engine_errors_are_errors_of_the_package() -> None:
    """What callers catch covers what is raised above."""
    assert all(issubclass(error, BarrelError) for error in (BadModel, GrammarFailed, NotSupported, ContextOverflow))
