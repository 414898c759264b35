"""The rows of one decode call in llama.cpp's arrays."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import llama_cpp.llama_cpp as L

from barrel_inference.workers.model.engine import Row


class Run(NamedTuple):
    """The rows of one sequence in a call: consecutive positions [start, end)."""

    seq: int
    start: int
    end: int


def runs_of(rows: Sequence[Row]) -> list[Run] | None:
    """Each sequence with its positions; None if those of one are not consecutive in the order of the rows. Pure."""
    found: dict[int, tuple[int, int]] = {}
    for _, position, seq, _ in rows:
        start, end = found.get(seq, (position, position))
        if end != position:
            return None
        found[seq] = start, end + 1
    return [Run(seq, start, end) for seq, (start, end) in found.items()]


class LlamaBatch:
    """Room for `n_rows` rows; the arrays live as long as this does, llama.cpp keeps plain pointers."""

    def __init__(self, n_rows: int) -> None:
        self._tokens = (L.llama_token * n_rows)()
        self._positions = (L.llama_pos * n_rows)()
        self._seqs = (L.llama_seq_id * n_rows)()
        self._wanted = (ctypes.c_int8 * n_rows)()
        self._counts = (ctypes.c_int32 * n_rows)(*[1] * n_rows)  # every row belongs to one sequence
        step = ctypes.sizeof(L.llama_seq_id)
        first = ctypes.addressof(self._seqs)
        self._seq_addresses = (ctypes.c_size_t * n_rows)(*range(first, first + n_rows * step, step))
        seq_pointers = ctypes.cast(self._seq_addresses, ctypes.POINTER(ctypes.POINTER(L.llama_seq_id)))
        self.struct = L.llama_batch(0, self._tokens, None, self._positions, self._counts, seq_pointers, self._wanted)

    def fill(self, rows: Sequence[Row]) -> tuple[list[Run] | None, frozenset[int]]:
        """Take the rows; returns what `runs_of` says, and which rows want logits."""
        count = len(rows)
        tokens, positions, seqs, wanted = map(list, zip(*rows, strict=True))
        self._tokens[:count], self._positions[:count], self._seqs[:count] = tokens, positions, seqs
        self._wanted[:count] = wanted
        self.struct.n_tokens = count
        return runs_of(rows), frozenset(number for number, row in enumerate(rows) if row.wants_logits)
