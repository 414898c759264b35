"""The llama.cpp engine: one model, one context. Only this file and its `llama_*` neighbours import llama_cpp.

Its parts: llama_open (loading), llama_load (options to model and context), llama_vocab (text and tokens), llama_batch (rows),
llama_state (what sequences hold, export and import), llama_sampler (choosing a token), llama_check (may state be cached), llama_log.
"""

import ctypes
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import llama_cpp.llama_cpp as L
import numpy as np

from barrel_inference.errors import BadModel, BarrelError, ContextOverflow, InvalidArgument, NotSupported
from barrel_inference.protocol import Sampling
from barrel_inference.workers.model import cores, fingerprint, llama_load, model_path, residency
from barrel_inference.workers.model.engine import EngineInfo, Logits, NoCells, Row, StepFailed, StepInterrupted
from barrel_inference.workers.model.llama_batch import LlamaBatch, Run
from barrel_inference.workers.model.llama_log import LogLines
from barrel_inference.workers.model.llama_sampler import Candidates, Grammars, LlamaSampler
from barrel_inference.workers.model.llama_state import LlamaState
from barrel_inference.workers.model.llama_vocab import LlamaVocab
from barrel_inference.workers.model.options import LoadOptions

# Asked by llama.cpp after every graph node: libc's strlen on a flag byte. It needs no GIL; a Python function would wait for
# it hundreds of times a token.
_STRLEN = L.ggml_abort_callback(ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value or 0)
_GO_ON, _STOP = b"", b"x"

_REFUSED = -1  # llama_decode: the batch makes no sense, nothing was computed
_NO_CELLS, _ABORTED = 1, 2


class LlamaEngine:
    """See `Engine`. Built by `llama_open.load`."""

    def __init__(
        self, model: object, context: object | None, options: LoadOptions, files: Sequence[Path], info: EngineInfo,
        log: LogLines, grammar_bytes: int,
    ) -> None:  # fmt: skip
        self.info = info
        self._model = model
        self._context = context
        self._options = options
        self._files = files
        self._log = log
        self.vocab = LlamaVocab(model)
        self.longest_piece_bytes = self.vocab.longest_piece_bytes
        self.tokenize = self.vocab.tokenize
        self.piece = self.vocab.piece
        self.special_piece = self.vocab.special_piece
        self.rendered = self.vocab.rendered
        self.is_end = self.vocab.is_end
        self._grammars = Grammars(self.vocab.handle, log, grammar_bytes)
        self._candidates = Candidates(info.n_vocab)
        self._adapters: dict[bytes, object] = {}  # loaded ones by content
        self._in_use: list[tuple[bytes, float]] = []
        self._embedder: tuple[object, int] | None = None  # context and how many tokens it takes
        self._rows: frozenset[int] = frozenset()
        self._logits_row = ctypes.c_float * info.n_vocab
        self._flag = ctypes.create_string_buffer(2)
        self._max_outputs = llama_load.max_outputs(options.context)
        self._batch = LlamaBatch(max(info.n_batch, 1))
        self.state = LlamaState(context, llama_load.kind_of(model, options.context), info.n_seq_max, log)
        if context:
            L.llama_set_abort_callback(context, _STRLEN, ctypes.cast(self._flag, ctypes.c_void_p))
        # Sequences and their state: the engine's methods are those of its parts.
        self.clear = self.state.clear
        self.can_cut = self.state.can_cut
        self.cut = self.state.cut
        self.share = self.state.share
        self.cells_bytes = self.state.cells_bytes
        self.export_cells = self.state.export_cells
        self.import_cells = self.state.import_cells
        self.snapshot_bytes = self.state.snapshot_bytes
        self.export_snapshot = self.state.export_snapshot
        self.import_snapshot = self.state.import_snapshot

    # --- computing

    def decode(self, rows: Sequence[Row]) -> None:
        """See `Engine`."""
        assert 0 < len(rows) <= self.info.n_batch, (len(rows), self.info.n_batch)
        context = self._require_context()
        self._rows = frozenset()
        runs, wanted = self._batch.fill(rows)
        assert len(wanted) <= self._max_outputs, (len(wanted), self._max_outputs)
        # llama.cpp lets an empty sequence begin anywhere, and computes on a recurrent state that belongs elsewhere.
        if runs is None or any(run.start != self.state.length(run.seq) for run in runs):
            raise StepFailed(_REFUSED)
        assert all(self.state.is_complete(run.seq) for run in runs), runs
        self._flag.value = _GO_ON
        code = int(L.llama_decode(context, self._batch.struct))
        if code == 0:
            for run in runs:
                self.state.grown(run.seq, run.end)
            self._rows = wanted
        elif code == _NO_CELLS:
            raise NoCells
        elif code == _ABORTED:
            raise StepInterrupted({run.seq: self.state.after_abort(run.seq) for run in runs})
        else:
            if code != _REFUSED:
                self._take_back(runs)
            raise StepFailed(code)

    def _take_back(self, runs: Sequence[Run]) -> None:
        """After a fatal error some micro-batches may have been stored; nothing of the call is to stay."""
        for run in runs:
            self.state.take_back(run.seq)

    def logits(self, row: int) -> Logits:
        """See `Engine`; an f32 for each token of the vocabulary."""
        assert row in self._rows, (row, self._rows)
        address = ctypes.cast(L.llama_get_logits_ith(self._context, row), ctypes.c_void_p).value
        assert address, row
        return memoryview(self._logits_row.from_address(address)).cast("B")

    def interrupt(self) -> None:
        """See `Engine`; between two calls it does nothing."""
        self._flag.value = _STOP

    def new_sampler(self, sampling: Sampling, *, seed: int, prompt: Sequence[int]) -> LlamaSampler:
        """See `Engine`."""
        self._require_context()
        return LlamaSampler(
            sampling,
            seed,
            prompt,
            n_vocab=self.info.n_vocab,
            candidates=self._candidates,
            grammars=self._grammars,
        )

    def set_threads(self, count: int) -> None:
        """See `Engine`; a deterministic context keeps the number it was loaded with."""
        if not self._context:
            return
        most = llama_load.threads_of(self._options.context)
        single, batch = most if self._options.context.deterministic else (min(most[0], count), min(most[1], count))
        L.llama_set_n_threads(self._context, single, batch)
        self.place_threads(single, batch)

    def place_threads(self, single: int, batch: int) -> None:
        """Each on a core of its own if so many need all cores; 0 = anywhere. The calling thread is one of them."""
        most = llama_load.threads_of(self._options.context)
        # Teams of two sizes: what the larger one has more is made anew each time, where its maker is bound. And with layers
        # on a GPU the cores have little to do.
        if most[0] == most[1] and self._options.llama is not None and not self._options.llama.n_gpu_layers:
            cores.spread(team=most[0], working=min(single, batch))

    def embed(self, tokens: Sequence[int]) -> list[float]:
        """See `Engine`; of length 1, pooled as the model says, by the mean if it says nothing."""
        if self.info.vocab_only:
            raise _vocab_only()
        if not tokens:
            raise InvalidArgument("an empty text has no embedding")
        if len(tokens) > self.info.n_ctx:
            raise ContextOverflow(f"the text has {len(tokens)} tokens, n_ctx is {self.info.n_ctx}")
        for token in tokens:
            self.vocab.check(token)
        context = self._embedding_context(len(tokens))
        memory = L.llama_get_memory(context)
        if memory:
            L.llama_memory_seq_rm(memory, 0, -1, -1)
        batch = LlamaBatch(len(tokens))
        batch.fill([Row(token, position, 0, True) for position, token in enumerate(tokens)])
        code = int((L.llama_decode if memory else L.llama_encode)(context, batch.struct))
        if code:
            raise StepFailed(code)
        size = int(L.llama_model_n_embd_out(self._model))
        pointer = L.llama_get_embeddings_seq(context, 0)
        vector = np.ctypeslib.as_array(pointer, shape=(size,)).astype(np.float64)
        return [float(value) for value in vector / (np.linalg.norm(vector) or 1.0)]

    def _embedding_context(self, n_tokens: int) -> object:
        """A context of its own, so that no sequence is touched; made anew when a longer text comes."""
        if self._embedder is None or self._embedder[1] < n_tokens:
            if self._embedder:
                L.llama_free(self._embedder[0])
                self._embedder = None
            room = min(self.info.n_ctx, 1 << (n_tokens - 1).bit_length())
            context = llama_load.make_embedding_context(self._model, self._options.context, room, self._log)
            self._embedder = context, room
            self._apply_adapters(context)
        return self._embedder[0]

    # --- adapters

    def set_adapters(self, adapters: Sequence[tuple[str, float]]) -> bytes:
        """See `Engine`.

        They are applied in the order of their contents, as sums of several differ by rounding with the order.

        Raises:
            BadModel: an adapter cannot be loaded, or does not fit the model; the former ones stay.
        """
        if self.info.vocab_only:
            raise _vocab_only()
        try:
            wanted = sorted((self._loaded_adapter(path), scale) for path, scale in adapters if scale)
        except BarrelError:
            self._free_unused_adapters()
            raise
        self._in_use = wanted
        for context in filter(None, (self._context, self._embedder and self._embedder[0])):
            self._apply_adapters(context)
        self._free_unused_adapters()
        if not wanted:
            return self.info.fingerprint
        parts = b"".join(digest + np.float32(scale).tobytes() for digest, scale in wanted)
        return hashlib.sha256(self.info.fingerprint + parts).digest()

    def _free_unused_adapters(self) -> None:
        used = {digest for digest, _ in self._in_use}
        for digest in [digest for digest in self._adapters if digest not in used]:
            L.llama_adapter_lora_free(self._adapters.pop(digest))

    def _loaded_adapter(self, path: str) -> bytes:
        """The SHA-256 of an adapter's file, which is loaded then."""
        file = Path(model_path.from_text(path))
        model_path.check_file(file, "adapter")
        try:
            digest = fingerprint.file_digest(file)
        except OSError as bad:
            raise BadModel(f"adapter {path!r} cannot be read: {bad.strerror}") from bad
        if digest not in self._adapters:
            self._log.clear()
            adapter = L.llama_adapter_lora_init(self._model, os.fsencode(file))
            if not adapter:
                raise BadModel(f"adapter {path!r} cannot be loaded: {self._log.reason()}")
            if L.llama_adapter_get_alora_n_invocation_tokens(adapter):
                L.llama_adapter_lora_free(adapter)
                raise NotSupported(f"adapter {path!r} is an activated LoRA, which applies to a part of a text only")
            self._adapters[digest] = adapter
        return digest

    def _apply_adapters(self, context: object) -> None:
        count = len(self._in_use)
        handles = (L.llama_adapter_lora_p_ctypes * count)()
        for place, (digest, _) in enumerate(self._in_use):
            handles[place] = self._adapters[digest]  # type: ignore[call-overload]  # an opaque handle of the bindings
        scales = (ctypes.c_float * count)(*(scale for _, scale in self._in_use))
        code = L.llama_set_adapters_lora(context, handles, count, scales)
        assert code == 0, code

    # --- the rest

    def pin_resident(self) -> int:
        """See `Engine`."""
        return residency.pin_resident(residency.weights_of(self._files))

    def close(self) -> None:
        """See `Engine`."""
        self._grammars.close()
        for context in filter(None, (self._context, self._embedder and self._embedder[0])):
            L.llama_free(context)
        self._context = self._embedder = None
        L.llama_model_free(self._model)

    def _require_context(self) -> object:
        if self._context is None:
            if self.info.vocab_only:
                raise _vocab_only()
            raise NotSupported("this model makes embeddings and cannot generate")
        return self._context


def _vocab_only() -> NotSupported:
    return NotSupported("this model was loaded with model_opts.vocab_only: it tokenizes and nothing else")
