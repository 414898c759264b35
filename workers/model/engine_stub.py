"""A deterministic engine without llama.cpp and without a model file, for fault injection and for scale.

Text: one token per word between blanks. A decimal word is that number's id; every other word has a stable id of its own in
a fixed range. A token is rendered as its decimal id and one blank.

Reply: a sequence has a *voice*, which every token changes, except the one that the voice itself says next. So a greedy reply
repeats one token that depends on the whole prompt, and never ends by itself. With a temperature each token depends on the
seed and its number too.

KV: a cell holds the voice after its token, a link that is made of all tokens up to it, and the link before it. Cells that do
not follow each other change what is said next: state that was mixed up by anyone shows in the reply.
"""

import hashlib
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from barrel_inference.errors import NotSupported
from barrel_inference.protocol import Sampling
from barrel_inference.workers.model.cores import usable_cores
from barrel_inference.workers.model.engine import EngineInfo, Logits, NoCells, Row, StepFailed, StepInterrupted
from barrel_inference.workers.model.options import STUB_THINKING, LoadOptions, StubModelOpts

N_VOCAB = 1 << 22
WORDS_FROM = 1 << 20  # ids of words that are no number: WORDS_FROM .. 2 * WORDS_FROM - 1
REPLIES_FROM = 500_000  # ids that a voice says: REPLIES_FROM .. REPLIES_FROM + REPLIES - 1
REPLIES = 499_979
THINK_OPEN, THINK_CLOSE = 3 << 20, (3 << 20) + 1
_MARKERS = {THINK_OPEN: STUB_THINKING.start.encode(), THINK_CLOSE: STUB_THINKING.end.encode()}
_MARKER_IDS = {text: token for token, text in _MARKERS.items()}
_EMBEDDING_SIZE = 16
_CELL = struct.Struct("<QQQ")  # voice, link, the link before
_VOICE = struct.Struct("<Q")
_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """One 64-bit number that depends on all of them and their order (the finalizer of splitmix64 in a chain)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ (value & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def word_id(word: bytes) -> int:
    """A word's token."""
    if word.isdigit() and int(word) < N_VOCAB:
        return int(word)
    return WORDS_FROM + int.from_bytes(hashlib.sha256(word).digest()[:4], "little") % WORDS_FROM


def said_by(voice: int) -> int:
    """The token that a voice says when the choice is greedy."""
    return REPLIES_FROM + voice % REPLIES


@dataclass(slots=True)
class _Cell:
    """The state after one token; shared by every sequence that has it in common."""

    voice: int
    link: int
    before: int
    owners: int = 1
    imported: bool = False


class StubSampler:
    """Says what the voice says; grammars, penalties and filters are taken and ignored."""

    def __init__(self, engine: "StubEngine", sampling: Sampling, seed: int) -> None:
        self._engine = engine
        self.sampling = sampling
        self._seed = seed

    def sample(self, logits: Logits, number: int) -> int:
        """See `Sampler.sample`."""
        thinking = self._engine.opts.thinking_tokens
        if thinking and number in (0, thinking + 1):
            return THINK_CLOSE if number else THINK_OPEN
        (voice,) = _VOICE.unpack(logits)
        return said_by(mix(voice, self._seed, number) if self.sampling.temperature else voice)

    def accept(self, token: int, number: int) -> None:
        """See `Sampler.accept`; nothing depends on it here."""

    def top_logprobs(self, logits: Logits, count: int) -> list[tuple[int, float]]:
        """See `Sampler.top_logprobs`: each next one is half as likely."""
        first = said_by(*_VOICE.unpack(logits))
        return [((first + place) % N_VOCAB, -0.6931471805599453 * (place + 1)) for place in range(count)]

    def close(self) -> None:
        """See `Sampler.close`."""


class StubEngine:
    """See `Engine`."""

    def __init__(self, options: LoadOptions, info: EngineInfo) -> None:
        assert options.stub is not None
        self.opts: StubModelOpts = options.stub
        self.info = info
        self.calls = 0
        self._sequences: list[list[_Cell]] = [[] for _ in range(info.n_seq_max)]
        self._used_cells = 0
        self._rows: dict[int, int] = {}  # voices of the last call's rows that wanted logits
        self._flavour = 0  # changed by adapters
        self._interrupted = threading.Event()

    # --- vocabulary

    def longest_piece_bytes(self) -> int:
        """See `Engine`."""
        return 0

    def tokenize(self, text: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
        """See `Engine`."""
        markers = _MARKER_IDS if parse_special else {}
        return [markers.get(word) or word_id(word) for word in text.split()]

    def piece(self, token: int) -> bytes:
        """See `Engine`."""
        return b"" if token in _MARKERS else b"%d " % token

    def special_piece(self, token: int) -> bytes:
        """See `Engine`."""
        return _MARKERS.get(token) or b"%d " % token

    def rendered(self, token: int) -> bytes:
        """See `Engine`; no escape is needed, as no word renders as anything but digits and a blank."""
        return b"%d " % token

    def is_end(self, token: int) -> bool:
        """See `Engine`: a reply never ends by itself."""
        return False

    # --- computing

    def decode(self, rows: Sequence[Row]) -> None:
        """See `Engine`."""
        assert 0 < len(rows) <= self.info.n_batch, (len(rows), self.info.n_batch)
        self._require_context()
        self._interrupted.clear()
        self._rows = {}
        self.calls += 1
        self._inject_faults(rows)
        if self._used_cells + len(rows) > self.info.n_cells:
            raise NoCells
        if self.opts.step_ms and self._interrupted.wait(self.opts.step_ms / 1000):
            raise StepInterrupted({row.seq: len(self._sequences[row.seq]) for row in rows})
        for index, row in enumerate(rows):
            voice = self._append(row)
            if row.wants_logits:
                self._rows[index] = voice

    def _inject_faults(self, rows: Sequence[Row]) -> None:
        opts = self.opts
        tokens = {row.token for row in rows}
        if opts.crash_on_token in tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        if opts.hang_on_token in tokens:
            threading.Event().wait()
        if opts.decode_timeout_at == self.calls:
            self._interrupted.wait()
            raise StepInterrupted({row.seq: len(self._sequences[row.seq]) for row in rows})
        if opts.decode_failed_at == self.calls:
            raise StepFailed(1)
        poisoned = opts.poisoned_imports and any(
            cell.imported for seq in {row.seq for row in rows} for cell in self._sequences[seq]
        )
        if opts.fail_on_token in tokens or poisoned or not self._positions_fit(rows):
            raise StepFailed(-1)

    def _positions_fit(self, rows: Sequence[Row]) -> bool:
        """Does every row go where its sequence ends? llama.cpp refuses a gap and a repetition too."""
        ends: dict[int, int] = {}
        for row in rows:
            if row.position != ends.get(row.seq, len(self._sequences[row.seq])):
                return False
            ends[row.seq] = row.position + 1
        return True

    def _append(self, row: Row) -> int:
        cells = self._sequences[row.seq]
        voice, link = self._state(cells)
        if row.token != said_by(voice):
            voice = mix(voice, row.token)
        cells.append(_Cell(voice, mix(link, row.token, row.position), link))
        self._used_cells += 1
        return voice

    def _state(self, cells: list[_Cell]) -> tuple[int, int]:
        """Voice and link after these cells; imported ones are believed, and heard when they do not fit together."""
        if not cells:
            return mix(self._flavour, 1), mix(self._flavour, 2)
        last = cells[-1]
        if last.imported:
            links = [mix(self._flavour, 2), *(cell.link for cell in cells)]
            if any(cell.before != link for cell, link in zip(cells, links, strict=False)):
                return mix(last.voice, 3), mix(last.link, 3)
        return last.voice, last.link

    def logits(self, row: int) -> Logits:
        """See `Engine`; the voice after the row is all there is to say."""
        return _VOICE.pack(self._rows[row])

    def interrupt(self) -> None:
        """See `Engine`."""
        self._interrupted.set()

    def new_sampler(self, sampling: Sampling, *, seed: int, prompt: Sequence[int]) -> StubSampler:
        """See `Engine`."""
        self._require_context()
        return StubSampler(self, sampling, seed)

    def set_threads(self, count: int) -> None:
        """See `Engine`; there are none."""

    def embed(self, tokens: Sequence[int]) -> list[float]:
        """See `Engine`."""
        self._require_context()
        digest = mix(*tokens)
        return [mix(digest, place) / 2**63 - 1 for place in range(_EMBEDDING_SIZE)]

    def set_adapters(self, adapters: Sequence[tuple[str, float]]) -> bytes:
        """See `Engine`; paths stand for contents, as no file is read."""
        in_use = [(path, scale) for path, scale in adapters if scale]
        if not in_use:
            self._flavour = 0
            return self.info.fingerprint
        digest = hashlib.sha256(self.info.fingerprint + repr(in_use).encode()).digest()
        self._flavour = int.from_bytes(digest[:8], "little")
        return digest

    def pin_resident(self) -> int:
        """See `Engine`; there are no weights."""
        return 0

    def _require_context(self) -> None:
        if self.info.vocab_only:
            raise NotSupported("this model was loaded with model_opts.vocab_only: it tokenizes and nothing else")

    # --- sequences

    def clear(self, seq: int) -> None:
        """See `Engine`."""
        self._drop(seq, 0)

    def can_cut(self, seq: int, length: int) -> bool:
        """See `Engine`."""
        return 0 <= length <= len(self._sequences[seq])

    def cut(self, seq: int, length: int) -> bool:
        """See `Engine`."""
        if not self.can_cut(seq, length):
            return False
        self._drop(seq, length)
        return True

    def share(self, source: int, target: int, length: int) -> bool:
        """See `Engine`."""
        if not self.can_cut(source, length) or self._sequences[target]:
            return False
        cells = self._sequences[source][:length]
        for cell in cells:
            cell.owners += 1
        self._sequences[target] = cells
        return True

    def _drop(self, seq: int, length: int) -> None:
        for cell in self._sequences[seq][length:]:
            cell.owners -= 1
            self._used_cells -= not cell.owners
        del self._sequences[seq][length:]

    # --- state

    def cells_bytes(self, seq: int, start: int, end: int) -> int:
        """See `Engine`."""
        if not 0 <= start < end <= len(self._sequences[seq]):
            return -1
        return (end - start) * self.opts.bytes_per_token

    def export_cells(self, seq: int, start: int, end: int, target: memoryview) -> bool:
        """See `Engine`."""
        if self.cells_bytes(seq, start, end) != len(target):
            return False
        padding = bytes(self.opts.bytes_per_token - _CELL.size)
        target[:] = b"".join(
            _CELL.pack(cell.voice, cell.link, cell.before) + padding for cell in self._sequences[seq][start:end]
        )
        return True

    def import_cells(self, seq: int, start: int, end: int, source: memoryview) -> bool:
        """See `Engine`."""
        width = self.opts.bytes_per_token
        if len(self._sequences[seq]) != start or end <= start or len(source) != (end - start) * width:
            return False
        if self._used_cells + end - start > self.info.n_cells:
            raise NoCells
        for at in range(0, len(source), width):
            voice, link, before = _CELL.unpack_from(source, at)
            self._sequences[seq].append(_Cell(voice, link, before, imported=True))
        self._used_cells += end - start
        return True

    def snapshot_bytes(self, seq: int) -> int:
        """See `Engine`; cells are all there is."""
        return 0

    def export_snapshot(self, seq: int, target: memoryview) -> bool:
        """See `Engine`."""
        return False

    def import_snapshot(self, seq: int, length: int, source: memoryview) -> bool:
        """See `Engine`."""
        return False

    def close(self) -> None:
        """See `Engine`."""


def load(options: LoadOptions, *, on_progress: Callable[[float], None]) -> StubEngine:
    """An engine that serves at once; the model path is any text."""
    assert options.stub is not None
    if options.stub.crash_at_load:
        os.kill(os.getpid(), signal.SIGKILL)
    for tenth in range(10):
        on_progress(tenth / 10)
        time.sleep(options.stub.load_ms / 10_000)
    on_progress(1.0)
    return StubEngine(options, _info(options))


def _info(options: LoadOptions) -> EngineInfo:
    assert options.stub is not None
    context = options.context
    width = options.stub.bytes_per_token
    layout = f"stub {context.cells} {context.n_batch} {width} {context.deterministic}"
    return EngineInfo(
        n_ctx=context.n_ctx,
        n_cells=context.cells,
        n_batch=context.n_batch,
        n_seq_max=context.n_seq_max,
        n_vocab=N_VOCAB,
        logits_bytes=_VOICE.size,
        n_threads=context.n_threads or usable_cores(),
        window_tokens=0,
        has_cells=True,
        needs_snapshot=False,
        cacheable=True,
        fingerprint=options.fingerprint or hashlib.sha256(f"stub:{options.model_path}".encode()).digest(),
        quant_type=options.quant_type or "f16",
        quant_bits=options.quant_bits or 16,
        ctx_params_hash=options.ctx_params_hash or hashlib.sha256(layout.encode()).digest(),
        memory_bytes={"weights": 0, "kv": context.cells * width, "compute": 0},
        vocab_only=options.vocab_only,
    )
