"""The rows of one decode call in llama.cpp's arrays, filled without a Python step per field."""

import ctypes
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import llama_cpp.llama_cpp as L
import numpy as np
import numpy.typing as npt

from barrel_inference.workers.model.engine import Row

_FIELDS = len(Row._fields)


class Run(NamedTuple):
    """The rows of one sequence in a call: consecutive positions [start, end)."""

    seq: int
    start: int
    end: int


def runs_of(seqs: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]) -> list[Run] | None:
    """Each sequence with its positions; None if those of one are not consecutive in the order of the rows. Pure."""
    order = np.argsort(seqs, kind="stable")
    seqs, positions = seqs[order], positions[order]
    starts = np.flatnonzero(np.diff(seqs, prepend=seqs[0] - 1))
    ends = np.append(starts[1:], len(seqs))
    steps = np.diff(positions)
    steps[starts[1:] - 1] = 1  # from one sequence to the next anything goes
    if not np.all(steps == 1):
        return None
    return [
        Run(int(seqs[first]), int(positions[first]), int(positions[last - 1]) + 1)
        for first, last in zip(starts, ends, strict=True)
    ]


class LlamaBatch:
    """Room for `n_rows` rows; the arrays live as long as this does, llama.cpp keeps plain pointers."""

    def __init__(self, n_rows: int) -> None:
        self._tokens = np.zeros(n_rows, np.int32)
        self._positions = np.zeros(n_rows, np.int32)
        self._seqs = np.zeros(n_rows, np.int32)
        self._wanted = np.zeros(n_rows, np.int8)
        self._counts = np.ones(n_rows, np.int32)  # every row belongs to one sequence
        step = self._seqs.itemsize
        self._seq_pointers = np.arange(n_rows, dtype=np.uint64) * step + self._seqs.ctypes.data
        self.struct = L.llama_batch(
            0,
            _pointer(self._tokens, L.llama_token),
            None,
            _pointer(self._positions, L.llama_pos),
            _pointer(self._counts, ctypes.c_int32),
            _pointer(self._seq_pointers, ctypes.POINTER(L.llama_seq_id)),
            _pointer(self._wanted, ctypes.c_int8),
        )

    def fill(self, rows: Sequence[Row]) -> tuple[list[Run] | None, frozenset[int]]:
        """Take the rows; returns what `runs_of` says, and which rows want logits."""
        count = len(rows)
        table = np.fromiter(chain.from_iterable(rows), np.int32, count * _FIELDS).reshape(count, _FIELDS)
        self._tokens[:count], self._positions[:count], self._seqs[:count], self._wanted[:count] = table.T
        self.struct.n_tokens = count
        wanted = frozenset(np.flatnonzero(self._wanted[:count]).tolist())
        return runs_of(self._seqs[:count], self._positions[:count]), wanted


def _pointer(array: npt.NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
