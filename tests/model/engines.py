"""Engines for tests, and the few moves that most claims about them are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from barrel_inference.protocol import Sampling
from barrel_inference.workers.model import engine_stub, llama_open
from barrel_inference.workers.model.engine import Engine, Row
from barrel_inference.workers.model.options import parse

NODE = 16  # tokens of a node in these tests; less than a window
SLICE = 32

# What a step says: the most likely tokens with their log-probabilities, to the last bit.
Outcome = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes engines of one kind."""

    kind: str  # "stub", or a kind of tests.model.tiny_gguf
    model_path: str
    state_dir: Path
    settings: Mapping[str, Any]
    context: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *, model_opts: dict[str, Any] | None = None, **context: Any) -> Engine:
        """An engine; `context` is laid over small defaults."""
        options = parse(
            {
                "model_path": self.model_path,
                "backend": "stub" if self.kind == "stub" else "llama",
                "model_opts": model_opts or {},
                "context_opts": {"n_ctx": 512, "n_batch": 128, "n_seq_max": 4, "n_threads": 1} | self.context | context,
            },
            self.settings,
        )
        if self.kind == "stub":
            return engine_stub.load(options, on_progress=lambda _fraction: None)
        return llama_open.load(options, state_dir=self.state_dir, on_progress=lambda _fraction: None)


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of a sequence's first `length` tokens, as nodes."""

    length: int
    nodes: tuple[tuple[int, int, bytes], ...]
    snapshot: bytes


def feed(engine: Engine, seq: int, tokens: Sequence[int], start: int = 0) -> Outcome:
    """Compute tokens[start:] of a sequence that holds the first `start`, in slices on a grid, the last one alone."""
    last = len(tokens) - 1
    while start < last:
        end = min(start // SLICE * SLICE + SLICE, last)
        engine.decode([Row(tokens[i], i, seq, False) for i in range(start, end)])
        start = end
    engine.decode([Row(tokens[last], last, seq, True)])
    return outcome(engine, 0)


def outcome(engine: Engine, row: int) -> Outcome:
    """All that a row of logits says."""
    sampler = engine.new_sampler(Sampling(), seed=0, prompt=[])
    try:
        return sampler.top_logprobs(engine.logits(row), 1000)
    finally:
        sampler.close()


def save(engine: Engine, seq: int, length: int) -> Saved:
    """Export a sequence that holds `length` tokens."""
    nodes = []
    for start in range(0, length, NODE):
        end = min(start + NODE, length)
        data = bytearray(engine.cells_bytes(seq, start, end))
        assert engine.export_cells(seq, start, end, memoryview(data))
        nodes.append((start, end, bytes(data)))
    snapshot = bytearray(engine.snapshot_bytes(seq))
    if snapshot:
        assert engine.export_snapshot(seq, memoryview(snapshot))
    return Saved(length, tuple(nodes), bytes(snapshot))


def restore(engine: Engine, seq: int, saved: Saved) -> bool:
    """Import a saved prefix into an empty sequence."""
    for start, end, data in saved.nodes:
        if not engine.import_cells(seq, start, end, memoryview(data)):
            return False
    return not engine.info.needs_snapshot or engine.import_snapshot(seq, saved.length, memoryview(saved.snapshot))


def clear_all(engine: Engine) -> None:
    """Empty the context, so that logits do not depend on where neighbours' cells lie."""
    for seq in range(engine.info.n_seq_max):
        engine.clear(seq)


def prompt_of(seed: int, length: int) -> list[int]:
    """Tokens that every test vocabulary has."""
    return [5 + (seed * 7919 + place * 104729 + place * place) % 240 for place in range(length)]
