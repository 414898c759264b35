"""Which rows go into the next decode call. Pure.

Decode rows first, one per generating sequence; then prefill slices. Slices end on a fixed grid of positions, and a prompt's
last token goes alone as a decode row, cold or warm (deterministic: unless it ends on the grid): so the batch shapes, and with them the rounding, do not depend on how
much was restored.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Want:
    """What one running sequence needs next."""

    seq: int
    position: int  # tokens it holds
    ready: int  # tokens known to follow that may be computed now; of these the last one of a prompt goes alone
    prefill: int  # of `ready`, how many belong to slices; 0 = one decode row


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [position, position + count) of one sequence, in this call."""

    seq: int
    position: int
    count: int
    is_prefill: bool


def slice_length(want: Want, chunk: int, room: int) -> int:
    """Tokens of the next prefill slice: up to the grid of `chunk`, what is left, and the room in the batch."""
    return min(chunk - want.position % chunk, want.prefill, room)


def plan(wants: Sequence[Want], *, n_batch: int, chunk: int, first: int = 0) -> list[Slice]:
    """The next call's rows, at most `n_batch` of them; `first` rotates who is served first when not all fit."""
    room = n_batch
    order = [*wants[first % len(wants) :], *wants[: first % len(wants)]] if wants else []
    out: list[Slice] = []
    for want in order:
        if not want.prefill and want.ready and room:
            out.append(Slice(want.seq, want.position, 1, False))
            room -= 1
    for want in order:
        if want.prefill and (count := slice_length(want, chunk, room)):
            out.append(Slice(want.seq, want.position, count, True))
            room -= count
    assert sum(part.count for part in out) <= n_batch  # more is an assert inside llama.cpp that kills the process
    return out
