"""What every engine promises, on the stub and on llama.cpp with every kind of memory."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from barrel_inference.protocol import Sampling
from barrel_inference.workers.model.engine import Engine, Logits, NoCells, Row, StepFailed, StepInterrupted
from barrel_inference.workers.model.engine_stub import StubEngine
from tests.model.engines import NODE, Maker, Saved, clear_all, feed, outcome, prompt_of, restore, save
from tests.model.tiny_gguf import KINDS

# Contexts that store their state differently: each has to keep every promise.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "stub": ("stub", {}),
    **{kind: (kind, {}) for kind in KINDS},
    "dense, no flash attention": ("dense", {"flash_attn": False}),
    "dense, q8_0": ("dense", {"flash_attn": True, "type_k": "q8_0", "type_v": "q8_0"}),
    "window, no flash attention": ("window", {"flash_attn": False}),
    "window, small cache": ("window", {"swa_full": False, "n_ubatch": 32}),
    "hybrid_window, small cache": ("hybrid_window", {"swa_full": False, "n_ubatch": 32}),
}
WITH_SNAPSHOTS = [
    name
    for name, (kind, context) in VARIANTS.items()
    if kind.startswith(("recurrent", "hybrid")) or "swa_full" in context
]
WITHOUT_SNAPSHOTS = [name for name in VARIANTS if name not in WITH_SNAPSHOTS]
snapshots_only = pytest.mark.parametrize("maker", WITH_SNAPSHOTS, indirect=True)
cuts_anywhere = pytest.mark.parametrize("maker", WITHOUT_SNAPSHOTS, indirect=True)

HELD = 4 * NODE  # tokens in most tests: more than a window


@pytest.fixture(params=VARIANTS)
def maker(
    request: pytest.FixtureRequest, tiny_models: Mapping[str, Path], packaged_settings: dict[str, Any], tmp_path: Path
) -> Maker:
    """Makes engines of one variant."""
    kind, context = VARIANTS[request.param]
    path = "anything" if kind == "stub" else str(tiny_models[kind])
    return Maker(kind, path, tmp_path, packaged_settings, context)


@pytest.fixture
def engine(maker: Maker) -> Iterator[Engine]:
    """An engine of the variant."""
    made = maker()
    yield made
    made.close()


def test_logits_are_a_function_of_the_prompt(engine: Engine) -> None:
    """The same prompt gives the same logits in any sequence of an empty context, another prompt gives others."""
    first = feed(engine, 0, prompt_of(1, HELD))
    clear_all(engine)
    assert feed(engine, 2, prompt_of(1, HELD)) == first
    clear_all(engine)
    assert feed(engine, 0, prompt_of(2, HELD)) != first


def test_every_memory_kind_is_cacheable(engine: Engine) -> None:
    """The check at load passes for all kinds that are known."""
    assert engine.info.cacheable


@snapshots_only
def test_snapshots_are_asked_for_where_they_are_needed(engine: Engine) -> None:
    """Recurrent, hybrid and small-window models say that they resume at snapshots only."""
    assert engine.info.needs_snapshot


@cuts_anywhere
def test_no_snapshots_are_asked_for_elsewhere(engine: Engine) -> None:
    """Attention with all its cells needs no snapshot and has none."""
    assert not engine.info.needs_snapshot
    feed(engine, 0, prompt_of(1, NODE))
    assert engine.snapshot_bytes(0) == 0


def test_imported_state_goes_on_as_the_live_one(engine: Engine) -> None:
    """Nodes exported from one sequence and imported into another give bit-equal logits from there on."""
    prompt = prompt_of(1, HELD + 20)
    feed(engine, 0, prompt[:HELD])
    saved = save(engine, 0, HELD)
    want = feed(engine, 0, prompt, HELD)
    clear_all(engine)
    assert restore(engine, 1, saved)
    assert feed(engine, 1, prompt, HELD) == want


def test_state_survives_another_context(maker: Maker) -> None:
    """State is read by a context with other sequence ids, if its hash is the same."""
    prompt = prompt_of(1, HELD + 20)
    one, other = maker(n_seq_max=1), maker(n_seq_max=6)
    feed(one, 0, prompt[:HELD])
    saved = save(one, 0, HELD)
    assert one.info.ctx_params_hash == other.info.ctx_params_hash
    assert restore(other, 5, saved)
    assert feed(other, 5, prompt, HELD) == feed(one, 0, prompt, HELD)
    one.close()
    other.close()


def test_foreign_state_gives_other_logits(engine: Engine) -> None:
    """A node that belongs to another prompt is heard: nothing hides a wrong import from the tests above."""
    prompt, stranger = prompt_of(1, HELD + 20), prompt_of(2, HELD)
    feed(engine, 0, prompt[:HELD])
    own = save(engine, 0, HELD)
    want = feed(engine, 0, prompt, HELD)
    clear_all(engine)
    feed(engine, 0, stranger)
    foreign = save(engine, 0, HELD)
    clear_all(engine)
    mixed = Saved(HELD, (*own.nodes[:-1], foreign.nodes[-1]), foreign.snapshot)
    assert restore(engine, 0, mixed)
    assert feed(engine, 0, prompt, HELD) != want


@cuts_anywhere
@pytest.mark.parametrize("keep", [HELD - 1, HELD - 5, HELD - NODE, HELD - NODE - 3])
def test_a_cut_goes_on_as_if_nothing_had_followed(engine: Engine, keep: int) -> None:
    """After a cut, live or imported, in a node or between two, the rest gives the logits of a run that never went further."""
    prompt = prompt_of(1, HELD)
    other = [*prompt[:keep], *prompt_of(3, 20)]
    feed(engine, 0, other[:keep])
    want = feed(engine, 0, other, keep)
    clear_all(engine)
    feed(engine, 0, prompt)
    saved = save(engine, 0, HELD)
    clear_all(engine)
    assert restore(engine, 0, saved)
    assert engine.can_cut(0, keep)
    assert engine.cut(0, keep)
    assert close_to(feed(engine, 0, other, keep), want)


def close_to(got: list[tuple[int, float]], want: list[tuple[int, float]]) -> bool:
    """Equal up to rounding: the slices before the cut had another shape. A wrong cell is off by far more."""
    values = dict(want)
    return all(abs(value - values[token]) < 2e-2 for token, value in got)


@snapshots_only
def test_state_that_cannot_be_cut_is_not(engine: Engine) -> None:
    """Recurrent and small-window models refuse a cut, and the sequence goes on as if nobody had asked."""
    prompt = prompt_of(1, HELD + 20)
    feed(engine, 0, prompt[:HELD])
    want = feed(engine, 0, prompt, HELD)
    clear_all(engine)
    feed(engine, 0, prompt[:HELD])
    assert not engine.can_cut(0, HELD - 1)
    assert not engine.cut(0, HELD - 1)
    assert engine.can_cut(0, HELD)
    assert engine.cut(0, HELD)
    assert feed(engine, 0, prompt, HELD) == want


@snapshots_only
def test_a_live_sequence_is_rolled_back_to_a_snapshot(engine: Engine) -> None:
    """A snapshot set on a longer live sequence takes it back, attention cells included."""
    prompt = prompt_of(1, HELD + 20)
    feed(engine, 0, prompt[:HELD])
    saved = save(engine, 0, HELD)
    want = feed(engine, 0, prompt, HELD)
    assert engine.import_snapshot(0, HELD, memoryview(saved.snapshot))
    assert feed(engine, 0, prompt, HELD) == want


@snapshots_only
def test_a_snapshot_of_another_length_is_refused(engine: Engine) -> None:
    """A snapshot belongs to the length it was taken at; refused, the sequence is empty and usable."""
    prompt = prompt_of(1, HELD + 20)
    want = feed(engine, 0, prompt)
    clear_all(engine)
    feed(engine, 0, prompt[:HELD])
    saved = save(engine, 0, HELD)
    assert not engine.import_snapshot(0, HELD - 8, memoryview(saved.snapshot))
    assert not engine.import_snapshot(0, HELD, memoryview(saved.snapshot))  # longer than what is held
    clear_all(engine)
    assert feed(engine, 0, prompt) == want


def test_ranges_that_are_not_held_have_no_bytes(engine: Engine) -> None:
    """Beyond the end, backwards and empty ranges are refused, and exporting them writes nothing."""
    if not engine.info.has_cells:
        assert engine.cells_bytes(0, 0, NODE) == 0
        return
    feed(engine, 0, prompt_of(1, NODE))
    target = memoryview(bytearray(64))
    for start, end in ((0, NODE + 1), (8, 4), (4, 4), (-1, 4)):
        assert engine.cells_bytes(0, start, end) == -1
        assert not engine.export_cells(0, start, end, target)
    assert not engine.export_cells(0, 0, 4, target[:5])
    assert bytes(target) == bytes(64)


def test_imports_that_do_not_fit_change_nothing(engine: Engine) -> None:
    """A node at the wrong place, cut short, or too long is refused, and the sequence goes on as before."""
    if not engine.info.has_cells:
        assert not engine.import_cells(0, 0, NODE, memoryview(b"something"))
        return
    prompt = prompt_of(1, NODE + 20)
    feed(engine, 0, prompt[:NODE])
    node = save(engine, 0, NODE).nodes[0][2]
    want = feed(engine, 0, prompt, NODE)
    clear_all(engine)
    feed(engine, 0, prompt[:NODE])
    assert not engine.import_cells(0, 0, NODE, memoryview(node))
    assert not engine.import_cells(0, NODE + 1, 2 * NODE + 1, memoryview(node))
    wrong = [node[:-1], node[: len(node) // 2], node + b"\0", b""]
    if not isinstance(engine, StubEngine):
        wrong.append(b"\0" * len(node))  # the stub believes any content of the right size
    for data in wrong:
        assert not engine.import_cells(0, NODE, 2 * NODE, memoryview(data))
        assert not engine.import_cells(1, 0, NODE + 1, memoryview(data))
    assert feed(engine, 0, prompt, NODE) == want


def test_sharing_moves_no_bytes_and_disturbs_nobody(engine: Engine) -> None:
    """A shared prefix goes on in the copy as in the original, which goes on too."""
    prompt, keep = prompt_of(1, HELD + 20), HELD - 5
    other = [*prompt[:keep], *prompt_of(3, 20)]
    feed(engine, 0, prompt[:HELD])
    if engine.info.needs_snapshot:
        assert not engine.share(0, 1, keep)
        return
    assert engine.share(0, 1, keep)
    copy = feed(engine, 1, other, keep)
    original = feed(engine, 0, prompt, HELD)
    clear_all(engine)
    assert close_to(copy, feed(engine, 0, other))
    clear_all(engine)
    assert close_to(original, feed(engine, 0, prompt))


def test_cleared_sequences_begin_anew(engine: Engine) -> None:
    """After `clear` a sequence holds nothing: it begins at 0, and only there."""
    feed(engine, 0, prompt_of(1, HELD))
    engine.clear(0)
    assert engine.can_cut(0, 0)
    assert not engine.can_cut(0, 1)
    with pytest.raises(StepFailed):
        engine.decode([Row(5, HELD, 0, True)])
    feed(engine, 0, prompt_of(2, HELD))


@pytest.mark.parametrize("position", [0, NODE - 1, NODE + 1])
def test_gaps_and_repetitions_are_refused(engine: Engine, position: int) -> None:
    """A row that does not follow what its sequence holds fails with -1, and nothing changes."""
    prompt = prompt_of(1, NODE + 20)
    feed(engine, 0, prompt[:NODE])
    want = feed(engine, 0, prompt, NODE)
    clear_all(engine)
    feed(engine, 0, prompt[:NODE])
    with pytest.raises(StepFailed) as failed:
        engine.decode([Row(5, position, 0, True)])
    assert failed.value.code == -1
    assert feed(engine, 0, prompt, NODE) == want


# Recurrent states never run out, and windows give back older cells.
@pytest.mark.parametrize("maker", ["stub", "dense", "dense, q8_0", "hybrid", "hybrid_parallel"], indirect=True)
def test_running_out_of_cells_changes_nothing(maker: Maker) -> None:
    """NoCells leaves every sequence as it was, and freed cells can be used again."""
    engine = maker(n_ctx=256, n_seq_max=3)
    prompt = prompt_of(1, 200)
    feed(engine, 0, prompt[:150])
    node = save(engine, 0, 150).nodes[0]
    want = feed(engine, 0, prompt, 150)
    clear_all(engine)
    feed(engine, 0, prompt[:150])
    feed(engine, 1, prompt_of(2, 100))
    with pytest.raises(NoCells):
        engine.decode([Row(5, i, 2, False) for i in range(engine.info.n_cells - 250 + 1)])
    with pytest.raises(NoCells):
        engine.import_cells(2, *node[:2], memoryview(node[2]))
    engine.clear(1)
    assert close_to(feed(engine, 0, prompt, 150), want)
    assert engine.import_cells(2, *node[:2], memoryview(node[2]))
    engine.close()


def test_more_rows_than_the_batch_are_a_bug_of_the_caller(engine: Engine) -> None:
    """llama.cpp would end the process: the engine stops before."""
    with pytest.raises(AssertionError):
        engine.decode([Row(5, i, 0, False) for i in range(engine.info.n_batch + 1)])
    with pytest.raises(AssertionError):
        engine.decode([])


def test_rows_of_several_sequences_share_a_call(engine: Engine) -> None:
    """Slices and single tokens of several sequences in one call each get their own logits."""
    one, two = prompt_of(1, 21), prompt_of(2, 41)
    want = feed(engine, 0, one), feed(engine, 1, two)
    clear_all(engine)
    feed(engine, 0, one[:20])
    feed(engine, 1, two[:32])
    engine.decode([Row(one[20], 20, 0, True), *(Row(two[i], i, 1, i == 40) for i in range(32, 41))])
    assert close_to(outcome(engine, 0), want[0])
    assert close_to(outcome(engine, 9), want[1])


def interrupted(engine: Engine, rows: list[Row]) -> StepInterrupted | None:
    """Decode while another thread keeps interrupting; None if the call was faster."""
    over = threading.Event()

    def nag() -> None:
        while not over.is_set():
            engine.interrupt()

    nagger = threading.Thread(target=nag)
    nagger.start()
    try:
        engine.decode(rows)
    except StepInterrupted as stopped:
        return stopped
    finally:
        over.set()
        nagger.join()
    return None


def test_an_interrupted_call_says_how_to_go_on(maker: Maker) -> None:
    """Afterwards each sequence of the batch holds what `lengths` says, or is rebuilt from a snapshot; others are untouched."""
    stub = maker.kind == "stub"
    engine = maker(n_ctx=1024, n_batch=512, n_ubatch=64, model_opts={"step_ms": 20} if stub else None)
    prompt, bystander = prompt_of(1, HELD + 512), prompt_of(2, HELD + 1)
    want = feed(engine, 0, prompt)
    clear_all(engine)
    feed(engine, 1, bystander[:HELD])
    feed(engine, 0, prompt[:HELD])
    saved = save(engine, 0, HELD)
    stopped = None
    while stopped is None:
        stopped = interrupted(engine, [Row(prompt[i], i, 0, False) for i in range(HELD, HELD + 511)])
        if stopped is None:  # it was faster than the other thread: once more
            engine.clear(0)
            feed(engine, 0, prompt[:HELD])
    held = stopped.lengths[0]
    if held is None:
        assert engine.info.needs_snapshot
        assert engine.import_snapshot(0, HELD, memoryview(saved.snapshot))
        held = HELD
    assert stopped.lengths.keys() == {0}
    assert close_to(feed(engine, 0, prompt, held), want)
    feed(engine, 1, bystander, HELD)
    engine.close()


def test_an_interrupt_between_calls_stops_nothing(engine: Engine) -> None:
    """The flag of a call that is over does not hit the next one."""
    engine.interrupt()
    feed(engine, 0, prompt_of(1, HELD))


def test_draws_depend_on_seed_and_number_only(engine: Engine) -> None:
    """A sampler made anew draws the same token for the same (row, seed, number), whatever was drawn between."""
    feed(engine, 0, prompt_of(1, HELD))
    hot = Sampling(temperature=1.5, top_k=50)

    def draws(seed: int, numbers: list[int]) -> list[int]:
        sampler = engine.new_sampler(hot, seed=seed, prompt=prompt_of(1, HELD))
        try:
            return [sampler.sample(engine.logits(0), number) for number in numbers]
        finally:
            sampler.close()

    first = draws(42, list(range(20)))
    assert draws(42, list(range(20))) == first
    assert draws(42, [19, 3, 7]) == [first[19], first[3], first[7]]
    assert len(set(first)) > 3
    assert draws(99, list(range(20))) != first


def test_greedy_takes_the_likeliest(engine: Engine) -> None:
    """At temperature 0 the seed means nothing and the most likely token comes."""
    top = feed(engine, 0, prompt_of(1, HELD))[0][0]
    for seed in (1, 2):
        sampler = engine.new_sampler(Sampling(), seed=seed, prompt=prompt_of(1, HELD))
        assert sampler.sample(engine.logits(0), 0) == top
        sampler.accept(top, 0)
        sampler.close()


def test_a_stored_row_answers_without_a_decode(engine: Engine) -> None:
    """State restored to its end and the row of logits kept with it go on as the live sequence does, draw by draw."""
    prompt = prompt_of(1, HELD)
    options = Sampling(temperature=1.5, top_k=50, repetition_penalty=1.3)

    def drawn(first: Logits) -> list[int]:
        sampler = engine.new_sampler(options, seed=7, prompt=prompt)
        tokens = [sampler.sample(first, 0)]
        for number in range(1, 6):
            engine.decode([Row(tokens[-1], HELD + number - 1, 0, True)])
            tokens.append(sampler.sample(engine.logits(0), number))
        sampler.close()
        return tokens

    feed(engine, 0, prompt)
    row, state = bytes(engine.logits(0)), save(engine, 0, HELD)
    assert len(row) == engine.info.logits_bytes
    live = drawn(row)
    clear_all(engine)
    feed(engine, 1, prompt_of(2, HELD))
    clear_all(engine)
    assert restore(engine, 0, state)
    assert drawn(row) == live


def test_logprobs_are_in_order_and_are_probabilities(engine: Engine) -> None:
    """The alternatives come likeliest first and sum up to at most 1."""
    feed(engine, 0, prompt_of(1, HELD))
    sampler = engine.new_sampler(Sampling(), seed=0, prompt=[])
    top = sampler.top_logprobs(engine.logits(0), 5)
    sampler.close()
    assert len(top) == 5
    assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
    assert all(value <= 0 for _, value in top)


def test_text_survives_the_round_trip(engine: Engine) -> None:
    """The pieces of a text's tokens spell its words; rendered bytes are a function of the tokens."""
    tokens = engine.tokenize(b"17 23 42", add_special=False, parse_special=False)
    assert b"".join(map(engine.piece, tokens)).strip() == b"17 23 42"
    assert b"".join(map(engine.rendered, tokens)).strip() == b"17 23 42"
    assert not any(map(engine.is_end, tokens))


def test_embeddings_tell_texts_apart_and_touch_no_sequence(engine: Engine) -> None:
    """Equal tokens have equal embeddings, others have others, and a live sequence does not notice."""
    prompt = prompt_of(1, HELD + 5)
    feed(engine, 0, prompt[:HELD])
    want = feed(engine, 0, prompt, HELD)
    clear_all(engine)
    feed(engine, 0, prompt[:HELD])
    first = engine.embed(prompt_of(3, 20))
    assert engine.embed(prompt_of(3, 20)) == first
    assert engine.embed(prompt_of(4, 50)) != first
    assert feed(engine, 0, prompt, HELD) == want


def test_adapters_change_the_fingerprint_and_back(engine: Engine) -> None:
    """Without adapters, and at scale 0, the effective fingerprint is the model's own."""
    assert engine.set_adapters([]) == engine.info.fingerprint
    assert engine.set_adapters([("/nowhere", 0.0)]) == engine.info.fingerprint
