"""The stub says what conformance needs of it, and has the faults that it is asked for."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from barrel_inference.protocol import Sampling
from barrel_inference.workers.model.engine import Row, StepFailed, StepInterrupted
from barrel_inference.workers.model.engine_stub import THINK_CLOSE, THINK_OPEN, WORDS_FROM, StubEngine
from tests.model.engines import Maker, feed, restore, save

Make = Callable[..., StubEngine]


@pytest.fixture
def make(packaged_settings: dict[str, Any], tmp_path: Path) -> Make:
    """Makes stub engines with model options."""

    def make_one(**model_opts: Any) -> StubEngine:
        engine = Maker("stub", "any", tmp_path, packaged_settings)(model_opts=model_opts)
        assert isinstance(engine, StubEngine)
        return engine

    return make_one


def say(engine: StubEngine, seq: int, tokens: list[int], count: int, sampling: Sampling | None = None) -> list[int]:
    """Prefill tokens and generate some."""
    feed(engine, seq, tokens)
    sampler = engine.new_sampler(sampling or Sampling(), seed=7, prompt=tokens)
    out: list[int] = []
    while len(out) < count:
        out.append(sampler.sample(engine.logits(0), len(out)))
        engine.decode([Row(out[-1], len(tokens) + len(out) - 1, seq, True)])
    return out


def test_words_are_tokens(make: Make) -> None:
    """A decimal word is that id, another word has a stable id of its own, and ids are rendered as decimals."""
    engine = make()
    tokens = engine.tokenize(b"1 2  12345 hello hello world", add_special=True, parse_special=False)
    assert tokens[:3] == [1, 2, 12345]
    assert tokens[3] == tokens[4] != tokens[5]
    assert all(token >= WORDS_FROM for token in tokens[3:])
    assert b"".join(map(engine.rendered, tokens[:3])) == b"1 2 12345 "
    assert engine.tokenize(engine.piece(tokens[5]), add_special=False, parse_special=False) == [tokens[5]]


def test_a_reply_repeats_one_token_that_the_prompt_decides(make: Make) -> None:
    """Greedy, it is the same token for ever; any change of the prompt changes it."""
    engine = make()
    first = say(engine, 0, [1, 2, 3], 5)
    assert len(set(first)) == 1
    assert say(engine, 1, [1, 2, 4], 1) != first[:1]
    assert say(engine, 2, [2, 1, 3], 1) != first[:1]


def test_a_second_turn_has_a_voice_of_its_own(make: Make) -> None:
    """After the reply and a new word the token is another one, that of the whole text."""
    engine = make()
    first = say(engine, 0, [1, 2, 3], 2)
    follow_up = [1, 2, 3, *first, 9]
    assert say(engine, 1, follow_up, 1) != first[:1]


def test_cells_out_of_order_are_heard(make: Make) -> None:
    """Cells of the same tokens at other places, or without what came before them, change the reply."""
    engine = make()
    prompt = list(range(1, 33))
    want = say(engine, 0, prompt, 1)
    engine.clear(0)
    feed(engine, 0, prompt)
    saved = save(engine, 0, 32)
    (_, _, one), (_, _, two) = saved.nodes
    for first, second in ((two, one), (one, one), (two, two)):
        engine.clear(0)
        assert engine.import_cells(0, 0, 16, memoryview(first))
        assert engine.import_cells(0, 16, 32, memoryview(second))
        assert engine.cut(0, 31)
        assert feed(engine, 0, prompt, 31)[0][0] != want[0]
    engine.clear(0)
    assert restore(engine, 0, saved)
    assert engine.cut(0, 31)
    assert feed(engine, 0, prompt, 31)[0][0] == want[0]


def test_thinking_tokens_stand_between_markers(make: Make) -> None:
    """A reply begins with the marker, so many tokens, and the closing marker."""
    engine = make(thinking_tokens=2)
    reply = say(engine, 0, [1, 2], 5)
    assert (reply[0], reply[3]) == (THINK_OPEN, THINK_CLOSE)
    assert (engine.piece(THINK_OPEN), engine.special_piece(THINK_OPEN)) == (b"", b"<think>")
    assert engine.tokenize(b"</think>", add_special=False, parse_special=True) == [THINK_CLOSE]
    assert engine.tokenize(b"</think>", add_special=False, parse_special=False) != [THINK_CLOSE]


def test_a_step_fails_where_it_was_asked_to(make: Make) -> None:
    """The numbered call fails with 1, once, and nothing of it is stored."""
    engine = make(decode_failed_at=2)
    engine.decode([Row(1, 0, 0, True)])
    with pytest.raises(StepFailed) as failed:
        engine.decode([Row(2, 1, 0, True)])
    assert failed.value.code == 1
    engine.decode([Row(2, 1, 0, True)])


def test_a_token_can_be_bad(make: Make) -> None:
    """Every call with it fails, calls without it do not."""
    engine = make(fail_on_token=13)
    for _ in range(2):
        with pytest.raises(StepFailed):
            engine.decode([Row(1, 0, 0, False), Row(13, 0, 1, True)])
    engine.decode([Row(1, 0, 0, True)])


def test_poisoned_imports_fail_when_they_are_used(make: Make) -> None:
    """The import succeeds, every call on it fails, a sequence without it goes on."""
    engine = make(poisoned_imports=True)
    feed(engine, 0, list(range(1, 33)))
    assert restore(engine, 1, save(engine, 0, 32))
    with pytest.raises(StepFailed):
        engine.decode([Row(5, 32, 1, True)])
    engine.decode([Row(5, 32, 0, True)])
    engine.clear(1)
    engine.decode([Row(5, 0, 1, True)])


def test_a_stuck_call_ends_when_it_is_interrupted(make: Make) -> None:
    """Only then, and with the lengths from before."""
    engine = make(decode_timeout_at=2)
    engine.decode([Row(1, 0, 0, True)])
    over = threading.Event()

    def nag() -> None:
        while not over.is_set():
            engine.interrupt()

    nagger = threading.Thread(target=nag)
    nagger.start()
    with pytest.raises(StepInterrupted) as stopped:
        engine.decode([Row(2, 1, 0, True)])
    over.set()
    nagger.join()
    assert stopped.value.lengths == {0: 1}


@pytest.mark.parametrize("fault", ["crash_on_token", "crash_at_load"])
def test_a_crash_is_a_kill(fault: str) -> None:
    """The process is gone as with SIGKILL: nothing is cleaned up, nobody is told."""
    program = f"""
from barrel_inference.workers.model import engine_stub, options
from barrel_inference.workers.model.engine import Row
settings = {{"cache": {{"policy": {{
    "min_tokens": 1, "cold_min_tokens": 1, "cold_max_tokens": 9, "continued_interval": 1, "boundary_trim_tokens": 0,
    "boundary_align_tokens": 1}}, "fingerprint_mode": "safe"}}, "tiers": {{"ram": {{}}}}}}
chosen = options.parse({{"model_path": "x", "backend": "stub", "model_opts": {{"{fault}": 1}}}}, settings)
engine_stub.load(chosen, on_progress=print).decode([Row(1, 0, 0, True)])
""".replace('"crash_at_load": 1', '"crash_at_load": True')
    assert subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=False).returncode == -9


def test_the_kv_of_a_token_can_be_large(make: Make) -> None:
    """So that tiers can be filled with few tokens."""
    engine = make(bytes_per_token=4096)
    feed(engine, 0, list(range(1, 33)))
    assert engine.cells_bytes(0, 0, 16) == 16 * 4096
    assert restore(engine, 1, save(engine, 0, 32))
