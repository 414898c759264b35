"""May this model's state be cached? Tried once at load, before anyone depends on it.

A few tokens: computed with the state as it is, and once more with a part of it exported and imported in between. Only
bit-equal logits will do; a memory kind that llama.cpp gains later and that fails here is not cached, and never wrong.
"""

from collections.abc import Sequence

from barrel_inference.workers.model.engine import Engine, Row

_NODE_TOKENS = 4
_TRIMMED_TOKENS = 3
_SLICE_TOKENS = 16


def keeps_its_state(engine: Engine) -> bool:
    """Does exported and imported state go on as the live one? Uses sequence 0 and leaves it empty."""
    node = min(_NODE_TOKENS, engine.info.window_tokens or _NODE_TOKENS)
    tokens = [(7 * number + 3) % engine.info.n_vocab for number in range(2 * node + 2)]
    try:
        if engine.info.needs_snapshot:
            return _snapshot_goes_on(engine, tokens, node)
        return _cells_go_on(engine, tokens, node)
    finally:
        engine.clear(0)


def _cells_go_on(engine: Engine, tokens: list[int], node: int) -> bool:
    keep = 2 * node - min(_TRIMMED_TOKENS, node - 1)
    feed(engine, tokens[:node], 0)
    feed(engine, tokens[node : 2 * node], node)
    nodes = [_exported(engine, start, start + node) for start in (0, node)]
    if None in nodes or not engine.cut(0, keep):
        return False
    want = feed(engine, tokens[keep:], keep)
    engine.clear(0)
    for number, data in enumerate(nodes):
        if data is None or not engine.import_cells(0, number * node, (number + 1) * node, memoryview(data)):
            return False
    return engine.cut(0, keep) and feed(engine, tokens[keep:], keep) == want


def _snapshot_goes_on(engine: Engine, tokens: list[int], node: int) -> bool:
    feed(engine, tokens[:node], 0)
    cells = _exported(engine, 0, node)
    snapshot = bytearray(engine.snapshot_bytes(0))
    if cells is None or not snapshot or not engine.export_snapshot(0, memoryview(snapshot)):
        return False
    want = feed(engine, tokens[node:], node)
    engine.clear(0)
    restored = engine.import_cells(0, 0, node, memoryview(cells)) and engine.import_snapshot(
        0, node, memoryview(snapshot)
    )
    return restored and feed(engine, tokens[node:], node) == want


def feed(engine: Engine, tokens: Sequence[int], position: int) -> bytes:
    """Compute tokens of sequence 0 as a prompt is: in slices, the last one alone; returns its logits."""
    step = max(1, min(_SLICE_TOKENS, engine.info.n_batch))
    last = len(tokens) - 1
    for start in range(0, last, step):
        end = min(start + step, last)
        engine.decode([Row(tokens[i], position + i, 0, False) for i in range(start, end)])
    engine.decode([Row(tokens[last], position + last, 0, True)])
    return bytes(engine.logits(0))


def _exported(engine: Engine, start: int, end: int) -> bytearray | None:
    size = engine.cells_bytes(0, start, end)
    if size < 0:
        return None
    data = bytearray(size)
    return data if engine.export_cells(0, start, end, memoryview(data)) else None
