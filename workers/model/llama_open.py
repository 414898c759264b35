"""Loading for the llama.cpp engine: from options to an engine that has decoded once, and every reason why not."""

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import llama_cpp.llama_cpp as L

from barrel_inference.errors import BadModel
from barrel_inference.workers.model import fingerprint, llama_load, residency
from barrel_inference.workers.model.engine import EngineInfo, NoCells, StepFailed, StepInterrupted
from barrel_inference.workers.model.engine_llama import LlamaEngine
from barrel_inference.workers.model.grammar_limits import MAX_GRAMMAR_BYTES
from barrel_inference.workers.model.llama_check import feed, keeps_its_state
from barrel_inference.workers.model.llama_log import LogLines, buffer_bytes
from barrel_inference.workers.model.llama_sampler import LOGIT_BYTES
from barrel_inference.workers.model.llama_vocab import LlamaVocab
from barrel_inference.workers.model.model_path import files_of, resolve
from barrel_inference.workers.model.options import LoadOptions
from barrel_inference.workers.model.quant import is_guessed, quant_of

# Tokens decoded once at load: a file that loads can still kill the process in its first decode, or refuse it.
_FIRST_TOKENS = 4


def uses_gpu(options: LoadOptions) -> bool:
    """Will layers be computed, and kept, on a GPU?"""
    return bool(options.llama and options.llama.n_gpu_layers and L.llama_supports_gpu_offload())


def load(
    options: LoadOptions, *, state_dir: Path, on_progress: Callable[[float], None],
    log_line: Callable[[str], None] | None = None, grammar_bytes: int = MAX_GRAMMAR_BYTES,
) -> LlamaEngine:  # fmt: skip
    """A llama.cpp engine that has decoded once.

    Args:
        state_dir: where fingerprints are remembered.
        on_progress: called with fractions from 0 to 1, by two threads in turn; reading the files for the fingerprint is
            one half, reading them for the weights the other.
        log_line: takes llama.cpp's log lines, for the log at debug level.

    Raises:
        BadModel: the file is not there, no model, not the one that was meant, or too large; the text says which.
        NotSupported: a kind of model that cannot be served.
    """
    assert options.llama is not None
    L.llama_backend_init()
    log = LogLines(log_line)
    files = files_of(resolve(options.model_path))
    model, digest = _model_and_fingerprint(options, files, state_dir, _Halves(on_progress), log)
    if not options.llama.prefetch:
        residency.advise_random(residency.weights_of(files))
    embeddings_only = llama_load.is_embedding_model(model)
    context = None
    if not options.vocab_only and not embeddings_only:
        context = llama_load.make_context(model, options.context, log)
    info = _info(model, context, options, log, digest)
    info = dataclasses.replace(info, embeddings_only=embeddings_only, warnings=_warnings(model, options))
    engine = LlamaEngine(model, context, options, files, info, log, grammar_bytes)
    if context:
        engine.place_threads(*llama_load.threads_of(options.context))
        try:
            _first_decode(engine, context, options, log)
        finally:
            engine.place_threads(0, 0)  # this thread goes on to do other things
    on_progress(1.0)
    return engine


class _Halves:
    """Two kinds of progress as one, which never goes back."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._done = [0.0, 0.0]
        self._lock = threading.Lock()

    def half(self, number: int) -> Callable[[float], None]:
        """Takes the progress of one of them."""

        def take(fraction: float) -> None:
            with self._lock:
                self._done[number] = max(fraction, self._done[number])
                self._tell(sum(self._done) / 2)

        return take


def _model_and_fingerprint(
    options: LoadOptions, files: Sequence[Path], state_dir: Path, progress: _Halves, log: LogLines
) -> tuple[object, bytes]:
    assert options.llama is not None
    hashing = fingerprint.Hashing(files, options.fingerprint_mode, options.fingerprint, state_dir, progress.half(0))
    try:
        model = llama_load.load_model(files[0], options.llama, log, progress.half(1))
    except BaseException:
        hashing.abandon()
        raise
    try:
        digest = hashing.result()
        _check_quant(options, llama_load.file_type(model))
    except BaseException:
        L.llama_model_free(model)
        raise
    return model, digest


def _check_quant(options: LoadOptions, file_type: int) -> None:
    """What was given as the quantisation has to be what the file says, if it says anything."""
    if is_guessed(file_type):
        return
    name, bits = quant_of(file_type)
    for key, given, found in (("quant_type", options.quant_type, name), ("quant_bits", options.quant_bits, bits)):
        if given is not None and given != found:
            raise BadModel(f"{key} = {given!r}, and {options.model_path!r} is {found!r}", hint=f"leave {key} out")


def _warnings(model: object, options: LoadOptions) -> tuple[str, ...]:
    """What was asked for and is not so, or not wise."""
    assert options.llama is not None
    found = []
    weights, locked = int(L.llama_model_size(model)), residency.locked_bytes()
    if options.llama.use_mlock and locked < weights:
        found.append(
            f"use_mlock: {locked} of {weights} bytes of weights are locked in memory; {residency.memlock_advice()}"
        )
    trained = int(L.llama_model_n_ctx_train(model))
    if not options.vocab_only and trained and options.context.n_ctx > trained:
        found.append(
            f"n_ctx = {options.context.n_ctx}: answers get worse beyond the {trained} tokens it was trained on"
        )
    return tuple(found)


def _first_decode(engine: LlamaEngine, context: object, options: LoadOptions, log: LogLines) -> None:
    """Compute something, and learn from its state what only a state tells."""
    try:
        feed(engine, [token % engine.info.n_vocab for token in range(1, _FIRST_TOKENS + 1)], 0)
        engine.state.measure(0)
        head = engine.state.head_of_one_cell(0)
        engine.clear(0)
        made_hash = llama_load.params_hash(
            context, options.context, head, log
        )  # before the check clears the log's lines
        cacheable = keeps_its_state(engine)
    except (StepFailed, NoCells, StepInterrupted) as failed:
        raise BadModel(
            f"the model loads, but cannot compute: {failed or type(failed).__name__}; {log.reason()}"
        ) from failed
    # A hash that was given separates further. Alone it could join contexts that cannot read each other's state.
    given = options.ctx_params_hash
    engine.info = dataclasses.replace(
        engine.info,
        cacheable=cacheable,
        ctx_params_hash=hashlib.sha256(given + made_hash).digest() if given else made_hash,
    )


def _info(model: object, context: object | None, options: LoadOptions, log: LogLines, digest: bytes) -> EngineInfo:
    vocab = LlamaVocab(model)
    opts = options.context
    kind = llama_load.kind_of(model, opts)
    quant_type, quant_bits = quant_of(llama_load.file_type(model))
    template = L.llama_model_chat_template(model, None)
    return EngineInfo(
        n_ctx=opts.n_ctx,
        n_cells=int(L.llama_n_ctx(context)) if context else 0,
        n_batch=int(L.llama_n_batch(context)) if context else opts.n_batch,
        n_seq_max=opts.n_seq_max,
        n_vocab=vocab.n_vocab,
        logits_bytes=vocab.n_vocab * LOGIT_BYTES,
        n_threads=llama_load.threads_of(opts)[0],
        window_tokens=kind.window_tokens,
        has_cells=kind.has_cells,
        needs_snapshot=kind.needs_snapshot,
        cacheable=False,
        fingerprint=digest,
        quant_type=options.quant_type or quant_type,
        quant_bits=options.quant_bits or quant_bits,
        ctx_params_hash=options.ctx_params_hash or bytes(32),
        memory_bytes={
            "weights": 0 if options.vocab_only else int(L.llama_model_size(model)),
            "kv": buffer_bytes(log.lines, "KV", "RS"),
            "compute": buffer_bytes(log.lines, "compute", "output"),
        },
        chat_template=template.decode("utf-8", "replace") if template else None,
        bos_text=vocab.bos_text(),
        eos_text=vocab.eos_text(),
        vocab_only=options.vocab_only,
    )
