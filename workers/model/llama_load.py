"""From options to a llama.cpp model and its contexts, and from these to what they really are."""

import ctypes
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import llama_cpp.llama_cpp as L

from barrel_inference.errors import BadModel, NotSupported
from barrel_inference.workers.model.cores import usable_cores
from barrel_inference.workers.model.llama_log import LogLines, rotations
from barrel_inference.workers.model.llama_state import MemoryKind
from barrel_inference.workers.model.options import HELPER_SEQUENCES, MIN_OUTPUTS, ContextOpts, LlamaModelOpts

_SPLIT_MODES = {"none": L.LLAMA_SPLIT_MODE_NONE, "layer": L.LLAMA_SPLIT_MODE_LAYER, "row": L.LLAMA_SPLIT_MODE_ROW}
_LOAD_MODES = {  # (use_mmap, use_mlock)
    (False, False): L.LLAMA_LOAD_MODE_NONE,
    (True, False): L.LLAMA_LOAD_MODE_MMAP,
    (False, True): L.LLAMA_LOAD_MODE_MLOCK,
    (True, True): L.LLAMA_LOAD_MODE_MMAP_MLOCK,
}
_GGML_TYPE_BF16 = 30  # of enum ggml_type; the bindings leave it out
_KV_TYPES = {
    "f16": L.GGML_TYPE_F16, "f32": L.GGML_TYPE_F32, "bf16": _GGML_TYPE_BF16, "q4_0": L.GGML_TYPE_Q4_0,
    "q5_0": L.GGML_TYPE_Q5_0, "q5_1": L.GGML_TYPE_Q5_1, "q8_0": L.GGML_TYPE_Q8_0,
}  # fmt: skip
_FLASH = {
    "auto": L.LLAMA_FLASH_ATTN_TYPE_AUTO,
    True: L.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    False: L.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_ROPE_SCALING = {
    "auto": L.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED, "none": L.LLAMA_ROPE_SCALING_TYPE_NONE,
    "linear": L.LLAMA_ROPE_SCALING_TYPE_LINEAR, "yarn": L.LLAMA_ROPE_SCALING_TYPE_YARN,
    "longrope": L.LLAMA_ROPE_SCALING_TYPE_LONGROPE,
}  # fmt: skip


def load_model(path: Path, opts: LlamaModelOpts, log: LogLines, on_progress: Callable[[float], None]) -> object:
    """A llama.cpp model.

    Raises:
        BadModel: with llama.cpp's own reason.
        NotSupported: a kind of model that this runtime cannot serve.
    """
    params = L.llama_model_default_params()
    params.n_gpu_layers = opts.n_gpu_layers
    params.split_mode = _SPLIT_MODES[opts.split_mode]
    params.main_gpu = opts.main_gpu
    params.load_mode = _LOAD_MODES[opts.use_mmap, opts.use_mlock]
    params.vocab_only = opts.vocab_only
    split = (ctypes.c_float * L.LLAMA_MAX_DEVICES)(*opts.tensor_split[: L.LLAMA_MAX_DEVICES])
    if opts.tensor_split:
        params.tensor_split = split

    def go_on(fraction: float, _data: object) -> bool:
        on_progress(fraction)
        return True

    progress = L.llama_progress_callback(go_on)
    params.progress_callback = progress
    log.clear()
    model: object = L.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise BadModel(f"{str(path)!r} cannot be loaded: {log.reason()}")
    if L.llama_model_has_encoder(model) or L.llama_model_is_diffusion(model):
        L.llama_model_free(model)
        raise NotSupported(f"{str(path)!r} is an encoder-decoder or diffusion model, which this runtime cannot serve")
    return model


def make_context(model: object, opts: ContextOpts, log: LogLines) -> object:
    """The context that all requests share.

    Raises:
        BadModel: with llama.cpp's own reason, too little memory for instance.
    """
    params = _base_params(opts)
    params.n_ctx, params.n_batch, params.n_ubatch = opts.cells, opts.n_batch, opts.ubatch
    params.n_seq_max = opts.n_seq_max + HELPER_SEQUENCES
    params.n_outputs_max = max_outputs(opts)
    params.kv_unified = True  # ranges of cells are copied between sequences, which separate streams cannot
    return _made(model, params, log)


def make_embedding_context(model: object, opts: ContextOpts, n_tokens: int, log: LogLines) -> object:
    """A context that pools one text of up to `n_tokens` tokens at once."""
    params = _base_params(opts)
    params.n_ctx = params.n_batch = params.n_ubatch = n_tokens  # pooling needs the whole text in one micro-batch
    params.n_seq_max = 1
    params.embeddings = True
    own = metadata(model, f"{metadata(model, 'general.architecture')}.pooling_type")
    params.pooling_type = L.LLAMA_POOLING_TYPE_UNSPECIFIED if own not in ("", "0") else L.LLAMA_POOLING_TYPE_MEAN
    return _made(model, params, log)


def max_outputs(opts: ContextOpts) -> int:
    """Rows of one decode call that may want logits; fewer than sequences, helpers included, is an assert as well."""
    return max(opts.n_seq_max + HELPER_SEQUENCES, MIN_OUTPUTS)


def threads_of(opts: ContextOpts) -> tuple[int, int]:
    """Threads for single tokens and for batches."""
    single = opts.n_threads or usable_cores()
    return single, opts.n_threads_batch or single


def _base_params(opts: ContextOpts) -> L.llama_context_params:
    params = L.llama_context_default_params()
    params.n_threads, params.n_threads_batch = threads_of(opts)
    params.type_k, params.type_v = _KV_TYPES[opts.type_k], _KV_TYPES[opts.type_v]
    params.flash_attn_type = _FLASH[opts.flash_attn]
    params.swa_full = opts.swa_full
    params.offload_kqv, params.op_offload = opts.offload_kqv, opts.op_offload
    params.n_rs_seq = 0  # its rollback says yes and leaves stale state (docs/explanation/llama_facts.md)
    params.rope_scaling_type = _ROPE_SCALING[opts.rope_scaling]
    params.rope_freq_base, params.rope_freq_scale = opts.rope_freq_base, opts.rope_freq_scale
    params.yarn_ext_factor, params.yarn_attn_factor = opts.yarn_ext_factor, opts.yarn_attn_factor
    params.yarn_beta_fast, params.yarn_beta_slow = opts.yarn_beta_fast, opts.yarn_beta_slow
    params.yarn_orig_ctx = opts.yarn_orig_ctx
    params.no_perf = True
    return params  # type: ignore[no-any-return]  # the bindings' own decorator hides the type


def _made(model: object, params: L.llama_context_params, log: LogLines) -> object:
    log.clear()
    context: object = L.llama_init_from_model(model, params)
    if not context:
        raise BadModel(
            f"no context of {params.n_ctx} cells can be made: {log.reason()}",
            hint="a smaller context_opts.n_ctx or n_batch needs less memory",
        )
    return context


def kind_of(model: object, opts: ContextOpts) -> MemoryKind:
    """How the model remembers."""
    return MemoryKind(
        recurrent=bool(L.llama_model_is_recurrent(model)),
        hybrid=bool(L.llama_model_is_hybrid(model)),
        window_tokens=int(L.llama_model_n_swa(model)),
        full_window=opts.swa_full,
    )


def metadata(model: object, key: str) -> str:
    """A metadata value as text; empty when the model has none."""
    buffer = ctypes.create_string_buffer(256)
    count = L.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if count >= 0 else ""


def is_embedding_model(model: object) -> bool:
    """Does it look at a text as a whole, so that it cannot generate?"""
    return metadata(model, f"{metadata(model, 'general.architecture')}.attention.causal") == "false"


def file_type(model: object) -> int:
    """`general.file_type`; what llama.cpp takes it for, from the tensors, when the file does not say."""
    return int(L.llama_model_ftype(model))


def params_hash(context: object, opts: ContextOpts, cell_head: bytes, log: LogLines) -> bytes:
    """What decides whether another context may read this one's state; llama.cpp checks almost none of it.

    `cell_head` is the state of one cell: behind its position and sequence stand the V layout (which alone tells what flash
    attention `auto` became), the number of layers, the K type and its row size.
    """
    values = (
        "cells", int(L.llama_n_ctx(context)), "n_batch", int(L.llama_n_batch(context)),
        "n_ubatch", int(L.llama_n_ubatch(context)), "type_k", opts.type_k, "type_v", opts.type_v,
        "layout", cell_head[28:44].hex(), "rotations", rotations(log.lines), "swa_full", opts.swa_full,
        "rope", opts.rope_scaling, opts.rope_freq_base, opts.rope_freq_scale,
        "yarn", opts.yarn_ext_factor, opts.yarn_attn_factor, opts.yarn_beta_fast, opts.yarn_beta_slow, opts.yarn_orig_ctx,
        "deterministic", opts.deterministic and threads_of(opts), "llama", L.llama_version().decode(), llama_cpp.__version__,
        "state", int(L.LLAMA_STATE_SEQ_VERSION),
    )  # fmt: skip
    return hashlib.sha256("\n".join(map(repr, values)).encode()).digest()
