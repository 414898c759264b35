"""Tiny random models of every kind of memory that llama.cpp has, written in milliseconds.

`write_model(kind, path)` makes a GGUF of half a megabyte whose weights depend on the kind only. Text is tokenised by bytes, with
a few merged pieces, so that any UTF-8 survives the round trip. All weights are f32: rounding stays at 1e-3 at most, so that a
wrong cell stands out.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Shapes = dict[str, tuple[int, ...]]  # tensor name without block number -> shape, outermost first

WIDTH = 64  # of the residual stream
FEED_FORWARD = 96
QUERY_HEADS, KEY_HEADS, HEAD_WIDTH = 2, 1, 32
WINDOW = 32  # tokens
TRAINED_CONTEXT = 4096

# Recurrent layers (Mamba 1 and 2, short convolutions).
INNER, STATE, CONVOLUTION, STEP_RANK, STATE_HEADS = 128, 16, 4, 8, 4
SHORT_CONVOLUTION = 3

CHAT_TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_MERGES = ["▁", "▁t", "he", "▁the", "in", "er", "▁a", "an", "on", "re", "st", "é", "日", "日本"]
VOCABULARY: list[tuple[str, int]] = [
    ("<unk>", _UNKNOWN),
    ("<s>", _CONTROL),
    ("</s>", _CONTROL),
    *((f"<0x{byte:02X}>", _BYTE) for byte in range(256)),
    ("<|im_start|>", _CONTROL),
    ("<|im_end|>", _CONTROL),
    ("<tool>", _USER_DEFINED),
    *((piece, _NORMAL) for piece in _MERGES),
]
TOKEN_ID = {text: number for number, (text, _) in enumerate(VOCABULARY)}
FIRST_BYTE_TOKEN = TOKEN_ID["<0x00>"]

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_WORD_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"▁{letter}" for letter in _LETTERS), *_LETTERS]

_ATTENTION: Shapes = {
    "attn_q.weight": (QUERY_HEADS * HEAD_WIDTH, WIDTH),
    "attn_k.weight": (KEY_HEADS * HEAD_WIDTH, WIDTH),
    "attn_v.weight": (KEY_HEADS * HEAD_WIDTH, WIDTH),
    "attn_output.weight": (WIDTH, QUERY_HEADS * HEAD_WIDTH),
}
_NORMED_HEADS: Shapes = {"attn_q_norm.weight": (HEAD_WIDTH,), "attn_k_norm.weight": (HEAD_WIDTH,)}
_FEED_FORWARD: Shapes = {
    "ffn_gate.weight": (FEED_FORWARD, WIDTH),
    "ffn_up.weight": (FEED_FORWARD, WIDTH),
    "ffn_down.weight": (WIDTH, FEED_FORWARD),
}
_FEED_FORWARD_NORM: Shapes = {"ffn_norm.weight": (WIDTH,)}
_BEFORE: Shapes = {"attn_norm.weight": (WIDTH,)}
_AFTER: Shapes = {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
_SHORT_CONVOLUTION: Shapes = {
    "shortconv.conv.weight": (WIDTH, SHORT_CONVOLUTION),
    "shortconv.in_proj.weight": (3 * WIDTH, WIDTH),
    "shortconv.out_proj.weight": (WIDTH, WIDTH),
}
_MAMBA: Shapes = {
    "ssm_in.weight": (2 * INNER, WIDTH),
    "ssm_conv1d.weight": (INNER, CONVOLUTION),
    "ssm_conv1d.bias": (INNER,),
    "ssm_x.weight": (STEP_RANK + 2 * STATE, INNER),
    "ssm_dt.weight": (INNER, STEP_RANK),
    "ssm_dt.bias": (INNER,),
    "ssm_a": (INNER, STATE),  # these two have no `.weight`
    "ssm_d": (INNER,),
    "ssm_out.weight": (WIDTH, INNER),
}
_MAMBA2: Shapes = {
    "ssm_in.weight": (2 * INNER + 2 * STATE + STATE_HEADS, WIDTH),
    "ssm_conv1d.weight": (INNER + 2 * STATE, CONVOLUTION),
    "ssm_conv1d.bias": (INNER + 2 * STATE,),
    "ssm_dt.bias": (STATE_HEADS,),
    "ssm_a": (STATE_HEADS, 1),
    "ssm_d": (STATE_HEADS, 1),
    "ssm_norm.weight": (1, INNER),
    "ssm_out.weight": (WIDTH, INNER),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of model: its architecture, its layers, and what its metadata say beyond the common."""

    architecture: str
    layers: tuple[Shapes, ...]
    metadata: Callable[[gguf.GGUFWriter], None]
    final_norm: str = "output_norm.weight"
    key_heads: int | list[int] = KEY_HEADS
    extra: Shapes = field(default_factory=dict)


def _nothing(writer: gguf.GGUFWriter) -> None:
    """No metadata beyond the common."""


def _window_of_three(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(WINDOW)
    writer.add_sliding_window_pattern(3)  # every third layer sees everything


def _mamba(writer: gguf.GGUFWriter) -> None:
    _state_space(writer, STEP_RANK)


def _mamba2(writer: gguf.GGUFWriter) -> None:
    _state_space(writer, STATE_HEADS)


def _state_space(writer: gguf.GGUFWriter, rank: int) -> None:
    writer.add_ssm_conv_kernel(CONVOLUTION)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(rank)
    writer.add_ssm_group_count(1)


def _convolution(writer: gguf.GGUFWriter) -> None:
    writer.add_shortconv_l_cache(SHORT_CONVOLUTION)


def _convolution_and_window(writer: gguf.GGUFWriter) -> None:
    _convolution(writer)
    writer.add_sliding_window(WINDOW)


_DENSE_LAYER = _BEFORE | _ATTENTION | _FEED_FORWARD_NORM | _FEED_FORWARD
_CONVOLUTION_LAYER = _BEFORE | _SHORT_CONVOLUTION | _FEED_FORWARD_NORM | _FEED_FORWARD
_HYBRID_LAYERS = (_CONVOLUTION_LAYER, _DENSE_LAYER | _NORMED_HEADS, _CONVOLUTION_LAYER)
# In these files the norm before the feed-forward part has no `.weight`.
_PARALLEL_LAYER = _BEFORE | _ATTENTION | _MAMBA2 | {"ffn_norm": (WIDTH,)} | _FEED_FORWARD

KINDS: dict[str, Kind] = {
    "dense": Kind("llama", (_DENSE_LAYER,) * 3, _nothing),
    "window": Kind("gemma3", (_DENSE_LAYER | _NORMED_HEADS | _AFTER,) * 3, _window_of_three),
    "recurrent": Kind("mamba", (_BEFORE | _MAMBA,) * 3, _mamba, key_heads=0),
    # Layers without key heads are the recurrent ones.
    "hybrid": Kind("lfm2", _HYBRID_LAYERS, _convolution, "token_embd_norm.weight", [0, KEY_HEADS, 0]),
    "hybrid_window": Kind("lfm2", _HYBRID_LAYERS, _convolution_and_window, "token_embd_norm.weight", [0, KEY_HEADS, 0]),
    "hybrid_parallel": Kind("falcon-h1", (_PARALLEL_LAYER,) * 3, _mamba2),
}


def write_model(kind: str, path: Path, *, tensors_per_file: int = 0) -> None:
    """Write the tiny model of a kind; the same bytes every time.

    With `tensors_per_file` in parts beside `path`, named as llama.cpp names them.
    """
    plan = KINDS[kind]
    writer = gguf.GGUFWriter(path, plan.architecture, split_max_tensors=tensors_per_file)
    writer.add_name(f"tiny {kind}")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _describe(writer, plan)
    plan.metadata(writer)
    _add_vocabulary(writer)
    numbers = np.random.default_rng(int.from_bytes(hashlib.sha256(kind.encode()).digest()[:8], "little"))
    for name, shape in _tensors(plan).items():
        writer.add_tensor(name, _weights(numbers, name, shape))
    _finish(writer)


def write_embedding_model(path: Path) -> None:
    """Write a tiny encoder (BERT): it looks at a text as a whole, and cannot generate."""
    biased = {
        "attn_q": WIDTH,
        "attn_k": WIDTH,
        "attn_v": WIDTH,
        "attn_output": WIDTH,
        "ffn_up": FEED_FORWARD,
        "ffn_down": WIDTH,
    }
    layer: Shapes = {f"{name}.bias": (size,) for name, size in biased.items()}
    layer |= {f"{name}.weight": (size, FEED_FORWARD if name == "ffn_down" else WIDTH) for name, size in biased.items()}
    for norm in ("attn_output_norm", "layer_output_norm"):
        layer |= {f"{norm}.weight": (WIDTH,), f"{norm}.bias": (WIDTH,)}
    shapes: Shapes = {
        "token_embd.weight": (len(_WORD_PIECES), WIDTH),
        "position_embd.weight": (TRAINED_CONTEXT, WIDTH),
        "token_types.weight": (2, WIDTH),
        "token_embd_norm.weight": (WIDTH,),
        "token_embd_norm.bias": (WIDTH,),
    }
    for number in range(2):
        shapes |= {f"blk.{number}.{name}": shape for name, shape in layer.items()}
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(TRAINED_CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(2)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(QUERY_HEADS)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(_WORD_PIECES)
    writer.add_token_types([_CONTROL if piece.startswith("[") else _NORMAL for piece in _WORD_PIECES])
    writer.add_token_type_count(2)
    writer.add_bos_token_id(_WORD_PIECES.index("[CLS]"))
    writer.add_unk_token_id(_WORD_PIECES.index("[UNK]"))
    writer.add_sep_token_id(_WORD_PIECES.index("[SEP]"))
    writer.add_pad_token_id(_WORD_PIECES.index("[PAD]"))
    writer.add_mask_token_id(_WORD_PIECES.index("[MASK]"))
    numbers = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(name, _weights(numbers, name, shape))
    _finish(writer)


def write_adapter(path: Path, *, seed: int, rank: int = 4) -> None:
    """Write a random LoRA for the dense model, on its queries and values."""
    writer = gguf.GGUFWriter(path, KINDS["dense"].architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))
    numbers = np.random.default_rng(seed)
    for layer in range(len(KINDS["dense"].layers)):
        for name in ("attn_q.weight", "attn_v.weight"):
            outputs, inputs = _ATTENTION[name]
            base = f"blk.{layer}.{name}"
            writer.add_tensor(f"{base}.lora_a", _normal(numbers, (rank, inputs), 1 / inputs**0.5))
            writer.add_tensor(f"{base}.lora_b", _normal(numbers, (outputs, rank), 0.5))
    _finish(writer)


def _describe(writer: gguf.GGUFWriter, plan: Kind) -> None:
    writer.add_context_length(TRAINED_CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(len(plan.layers))
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_layer_norm_rms_eps(1e-5)
    if plan.key_heads == 0:
        writer.add_head_count(0)
        return
    writer.add_head_count(QUERY_HEADS)
    writer.add_head_count_kv(plan.key_heads)
    writer.add_key_length(HEAD_WIDTH)
    writer.add_value_length(HEAD_WIDTH)
    writer.add_rope_dimension_count(HEAD_WIDTH)


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in VOCABULARY])
    writer.add_token_types([kind for _, kind in VOCABULARY])
    # Longer pieces are later in the list and win: their score is the higher one.
    writer.add_token_scores([float(number) if kind == _NORMAL else 0.0 for number, (_, kind) in enumerate(VOCABULARY)])
    writer.add_bos_token_id(TOKEN_ID["<s>"])
    writer.add_eos_token_id(TOKEN_ID["<|im_end|>"])
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _tensors(plan: Kind) -> Shapes:
    out: Shapes = {"token_embd.weight": (len(VOCABULARY), WIDTH), "output.weight": (len(VOCABULARY), WIDTH)}
    out[plan.final_norm] = (WIDTH,)
    for number, layer in enumerate(plan.layers):
        out |= {f"blk.{number}.{name}": shape for name, shape in layer.items()}
    return out


def _weights(numbers: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    if "norm" in name:
        return np.float32(1) + _normal(numbers, shape, 0.1)
    if name.endswith("ssm_a"):  # decay rates have to be negative
        return -np.exp(_normal(numbers, shape, 0.5))
    if len(shape) == 1 or name == "token_embd.weight":
        return _normal(numbers, shape, 1.0)
    return _normal(numbers, shape, 1.5 / shape[-1] ** 0.5)


def _normal(numbers: np.random.Generator, shape: tuple[int, ...], scale: float) -> Array:
    # f32 throughout: a tensor that became f64 on the way loads, and kills the process when it is used.
    return numbers.standard_normal(shape, dtype=np.float32) * np.float32(scale)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
