"""What the sequences of a context hold, and their state on its way out and in. Engine thread only.

llama.cpp says yes to much that is wrong (docs/explanation/llama_facts.md). So nothing is believed that can be checked:

* A range of cells goes out and in through a *spare* sequence. For hybrid models, a second helper that never holds a cell is
  copied over the spare, which drops the recurrent state that came along.
* The bytes of n whole cells are `header + n * row`, measured once; any other size means that cells are missing.
* Cells that a sliding window has passed may be taken by others. A cut or share at p needs the window before p to be whole.
* A failed `set_data` has emptied its target, so imports go into the spare first.
* Positions that llama.cpp reports for hybrid models are too small, so lengths are counted here.
"""

import ctypes
from dataclasses import dataclass

import llama_cpp.llama_cpp as L
import numpy as np

from barrel_inference.workers.model.engine import NoCells
from barrel_inference.workers.model.llama_log import LogLines

_PARTIAL = L.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_BYTES_P = ctypes.POINTER(ctypes.c_uint8)
_NO_ROOM = "available cells"  # in llama.cpp's own words, when a state does not fit


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """How a model remembers."""

    recurrent: bool  # nothing per position
    hybrid: bool  # cells, and a recurrent state
    window_tokens: int  # sliding window of some layers; 0 = none
    full_window: bool  # cells older than the window are kept while nobody needs them

    @property
    def has_cells(self) -> bool:
        """Is something stored per position?"""
        return not self.recurrent

    @property
    def small_window(self) -> bool:
        """Are the windowed layers' older cells dropped?"""
        return self.window_tokens > 0 and not self.full_window

    @property
    def needs_snapshot(self) -> bool:
        """Does a prefix resume only where a snapshot was taken?"""
        return self.recurrent or self.hybrid or self.small_window


@dataclass(frozen=True, slots=True)
class CellLayout:
    """Bytes of n whole cells: `header_bytes + n * row_bytes`."""

    header_bytes: int
    row_bytes: int

    def size(self, count: int) -> int:
        """Bytes that `count` cells take."""
        return self.header_bytes + count * self.row_bytes


class LlamaState:
    """The sequences of one context."""

    def __init__(self, context: object | None, kind: MemoryKind, n_seq_max: int, log: LogLines) -> None:
        self.kind = kind
        self._context = context
        self._memory = L.llama_get_memory(context) if context else None
        self._log = log
        self._spare, self._empty = n_seq_max, n_seq_max + 1
        self._lengths = [0] * n_seq_max
        # The recurrent state of the sequence does not belong to its end: cells were imported, or a call was interrupted.
        self._incomplete = [False] * n_seq_max
        self.layout: CellLayout | None = None  # of windows of a small cache: not known

    # --- what a sequence holds

    def length(self, seq: int) -> int:
        """Tokens that the sequence holds."""
        return self._lengths[seq]

    def is_complete(self, seq: int) -> bool:
        """May the sequence be computed on?"""
        return not self._incomplete[seq]

    def grown(self, seq: int, length: int) -> None:
        """A decode call stored tokens up to `length`."""
        self._lengths[seq] = length

    def after_abort(self, seq: int) -> int | None:
        """Tokens that the sequence holds after an interrupted call; None = only a snapshot or `clear` helps.

        Attention keeps whole micro-batches. Recurrent state is lost, whatever llama.cpp's positions say.
        """
        if self.kind.needs_snapshot:
            self._incomplete[seq] = True
            return None
        self._lengths[seq] = self.position_end(seq)
        return self._lengths[seq]

    def take_back(self, seq: int) -> None:
        """A call failed half-way: drop what it may have stored for the sequence."""
        if self.kind.needs_snapshot or not L.llama_memory_seq_rm(self._memory, seq, self._lengths[seq], -1):
            self._incomplete[seq] = True

    def position_end(self, seq: int) -> int:
        """One past the last position that llama.cpp has for the sequence."""
        return int(L.llama_memory_seq_pos_max(self._memory, seq)) + 1

    def clear(self, seq: int) -> None:
        """Drop everything the sequence holds."""
        self._remove(seq)
        self._lengths[seq], self._incomplete[seq] = 0, False

    def can_cut(self, seq: int, length: int) -> bool:
        """May the sequence be continued at `length`?"""
        held = self._lengths[seq]
        if length == 0:
            return True
        if not 0 < length <= held:
            return False
        if self.kind.needs_snapshot:
            return length == held
        return self._window_is_whole(seq, length)

    def _window_is_whole(self, seq: int, length: int) -> bool:
        """Are all cells there that tokens from `length` on look at?"""
        window = self.kind.window_tokens
        start = self._seen_from(length)
        if int(L.llama_memory_seq_pos_min(self._memory, seq)) > start:
            return False
        # A hole in the middle does not move the first position. Without a window no cell is ever taken.
        return not window or self._spare_size(seq, start, length) == self._whole_size(length - start)

    def _seen_from(self, length: int) -> int:
        """The first position that a token at `length` looks at in every layer."""
        return max(0, length - self.kind.window_tokens + 1) if self.kind.window_tokens else 0

    def cut(self, seq: int, length: int) -> bool:
        """Keep the first `length` tokens; False = refused."""
        if not self.can_cut(seq, length):
            return False
        if length == 0:
            self.clear(seq)
            return True
        if length == self._lengths[seq]:
            return True
        if not L.llama_memory_seq_rm(self._memory, seq, length, -1):
            return False
        self._lengths[seq] = length
        return self.position_end(seq) == length

    def share(self, source: int, target: int, length: int) -> bool:
        """Let an empty `target` hold the first `length` tokens of `source` too.

        Models that need snapshots share whole sequences only; with a small window cache not even these, as shared cells are
        never given back while one of the owners goes on.
        """
        assert not self._lengths[target], target
        if not length or not self.can_cut(source, length) or self.kind.small_window or self._incomplete[source]:
            return False
        end = -1 if length == self._lengths[source] else length
        L.llama_memory_seq_cp(self._memory, source, target, -1 if end < 0 else 0, end)
        if self.position_end(target) != length:
            self.clear(target)
            return False
        self._lengths[target] = length
        return True

    # --- cells

    def cells_bytes(self, seq: int, start: int, end: int) -> int:
        """Bytes of a range of cells; 0 = the model has none; -1 = not whole, or longer than the window."""
        if not self.kind.has_cells:
            return 0
        window = self.kind.window_tokens
        if not 0 <= start < end <= self._lengths[seq] or (window and end - start > window):
            return -1
        size = self._spare_size(seq, start, end, first=start)
        if size < 0 or (self.layout and size != self.layout.size(end - start)):
            return -1
        return size

    def export_cells(self, seq: int, start: int, end: int, target: memoryview) -> bool:
        """Write the KV of a range into `target`; False = its cells are not whole, or the size is another."""
        if not self.kind.has_cells:
            return not target
        if self.cells_bytes(seq, start, end) != len(target):
            return False
        self._copy_to_spare(seq, start, end)
        try:
            written = self._get(self._spare, target, 0)
        finally:
            self._remove(self._spare)
        return written == len(target)

    def import_cells(self, seq: int, start: int, end: int, source: memoryview) -> bool:
        """Append the KV of a range to a sequence that holds `start` tokens.

        Raises:
            NoCells: there is no room; the sequence is as before.
        """
        if self._lengths[seq] != start or end <= start:
            return False
        if not self.kind.has_cells:
            if source:
                return False
        elif not self._import_through_spare(seq, start, end, source):
            return False
        self._lengths[seq] = end
        self._incomplete[seq] = self.kind.needs_snapshot
        return True

    def _import_through_spare(self, seq: int, start: int, end: int, source: memoryview) -> bool:
        if self.layout and len(source) != self.layout.size(end - start):
            return False
        self._log.clear()
        if self._set(self._spare, source, 0) != len(source):
            self._remove(self._spare)
            if self._log.has_error(_NO_ROOM):
                raise NoCells
            return False
        fits = self._spare_holds(start, end)
        if fits:
            L.llama_memory_seq_cp(self._memory, self._spare, seq, -1, -1)
        self._remove(self._spare)
        return fits

    def _spare_holds(self, start: int, end: int) -> bool:
        """Are these the positions that were announced? What llama.cpp can tell depends on the kind of memory."""
        if self.kind.small_window:
            return True  # cells of the unwindowed layers only: llama.cpp reports no position
        if int(L.llama_memory_seq_pos_min(self._memory, self._spare)) != start:
            return False
        # Of a hybrid model's stripped range the last position is that of its missing recurrent part.
        return self.kind.hybrid or self.position_end(self._spare) == end

    # --- snapshots

    def snapshot_bytes(self, seq: int) -> int:
        """Bytes of the state that belongs to the sequence's end; 0 if the model needs none or the sequence is empty."""
        if not self.kind.needs_snapshot or not self._lengths[seq] or self._incomplete[seq]:
            return 0
        return int(L.llama_state_seq_get_size_ext(self._context, seq, _PARTIAL))

    def export_snapshot(self, seq: int, target: memoryview) -> bool:
        """Write that state."""
        size = self.snapshot_bytes(seq)
        return size > 0 and size == len(target) and self._get(seq, target, _PARTIAL) == size

    def import_snapshot(self, seq: int, length: int, source: memoryview) -> bool:
        """Set that state and cut the sequence at `length`. False: refused, and the sequence was cleared."""
        if not self.kind.needs_snapshot or not 0 < length <= self._lengths[seq]:
            return False
        done = (
            self._set(seq, source, _PARTIAL) == len(source)
            and bool(L.llama_memory_seq_rm(self._memory, seq, length, -1))
            and self.position_end(seq) == length
            and self._snapshot_window_is_whole(seq, length)
        )
        if not done:
            self.clear(seq)
            return False
        self._lengths[seq], self._incomplete[seq] = length, False
        return True

    def _snapshot_window_is_whole(self, seq: int, length: int) -> bool:
        """Are the window's cells those before `length`? A recurrent state refuses any other length by itself, cells do not."""
        if not self.kind.small_window or self.kind.hybrid:
            return True
        return int(L.llama_memory_seq_pos_min(self._memory, seq)) <= self._seen_from(length)

    # --- calibration, at load

    def measure(self, seq: int) -> None:
        """Find out how many bytes n cells take, on a sequence that holds at least 3 tokens."""
        if not self.kind.has_cells or self.kind.small_window:
            return
        one, two, three = (self._spare_size(seq, 0, count) for count in (1, 2, 3))
        if two - one == three - two > 0:
            self.layout = CellLayout(one - (two - one), two - one)

    def head_of_one_cell(self, seq: int) -> bytes:
        """The state of a sequence's first cell, from which the layout words can be read; empty without cells."""
        size = self._spare_size(seq, 0, 1) if self.kind.has_cells else 0
        data = bytearray(max(size, 0))
        if size > 0:
            self._copy_to_spare(seq, 0, 1)
            self._get(self._spare, memoryview(data), 0)
            self._remove(self._spare)
        return bytes(data)

    # --- llama.cpp

    def _whole_size(self, count: int) -> int:
        return self.layout.size(count) if self.layout else -2

    def _copy_to_spare(self, seq: int, start: int, end: int) -> None:
        L.llama_memory_seq_cp(self._memory, seq, self._spare, start, end)
        if self.kind.hybrid:
            L.llama_memory_seq_cp(self._memory, self._empty, self._spare, -1, -1)

    def _spare_size(self, seq: int, start: int, end: int, *, first: int | None = None) -> int:
        """Bytes of a range; -1 if `first` is given and is not the first position found in it."""
        self._copy_to_spare(seq, start, end)
        missing = (
            first is not None
            and not self.kind.small_window
            and int(L.llama_memory_seq_pos_min(self._memory, self._spare)) != first
        )
        size = -1 if missing else int(L.llama_state_seq_get_size_ext(self._context, self._spare, 0))
        self._remove(self._spare)
        return size

    def _remove(self, seq: int) -> None:
        L.llama_memory_seq_rm(self._memory, seq, -1, -1)

    def _get(self, seq: int, target: memoryview, flags: int) -> int:
        # numpy lends the address of any contiguous buffer; the array goes at the end, so that the buffer can be closed.
        array = np.frombuffer(target, np.uint8)
        assert array.flags.writeable
        pointer = array.ctypes.data_as(_BYTES_P)
        return int(L.llama_state_seq_get_data_ext(self._context, pointer, array.size, seq, flags))

    def _set(self, seq: int, source: memoryview, flags: int) -> int:
        if not source:
            return -1
        array = np.frombuffer(source, np.uint8)
        pointer = array.ctypes.data_as(_BYTES_P)
        return int(L.llama_state_seq_set_data_ext(self._context, pointer, array.size, seq, flags))
