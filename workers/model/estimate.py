"""How much memory a load will take, from the head of the file and the options. Pure.

The rules are llama.cpp's own, the numbers of `compute` are measured (docs/explanation/llama_facts.md): within about a third of
what llama.cpp then says that it took, rather above than below.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from barrel_inference.workers.model.gguf_header import GgufHeader
from barrel_inference.workers.model.options import HELPER_SEQUENCES, MIN_OUTPUTS, ContextOpts, LoadOptions

_CELL_STEP = 256  # llama.cpp makes cells in groups of so many
_F32_BYTES = 4
_MAX_LAYERS = 1 << 16  # a damaged head may say anything
_MAX_BYTES = 1 << 62
# Bytes of one element; quantised types have 32 elements and a scale in a block.
_ELEMENT_BYTES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_0": 18 / 32,
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes a load will take."""

    weights: int
    kv: int
    compute: int
    weights_are_mapped: bool  # pages of the file, which the kernel may drop and read again

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.compute

    def needed(self, cached_bytes: int) -> int:
        """What has to be found: the part of a mapped file that is in memory already needs no more."""
        present = min(cached_bytes, self.weights) if self.weights_are_mapped else 0
        return self.total - present

    def as_dict(self) -> dict[str, int]:
        """By the names of `ModelInfo.memory_bytes`."""
        return {"weights": self.weights, "kv": self.kv, "compute": self.compute}


def estimate(headers: Sequence[GgufHeader], options: LoadOptions) -> Estimate:
    """The estimate for a model of one or more files, the first of which describes it.

    Raises:
        ValueError, OverflowError: the head makes no sense.
    """
    assert options.llama is not None
    weights = sum(header.size_bytes - min(header.data_start, header.size_bytes) for header in headers)
    if options.vocab_only:
        return Estimate(0, 0, 0, weights_are_mapped=True)
    shape = Shape(headers[0])
    is_encoder = not shape.header.number(f"{shape.architecture}.attention.causal", 1)
    opts = options.context
    kv = 0 if is_encoder else kv_bytes(shape, opts)
    compute = 0 if is_encoder else compute_bytes(shape, opts)  # an encoder's context is made for the first text
    if not 0 <= kv + compute <= _MAX_BYTES:
        raise ValueError(f"its head makes no sense: it would take {kv + compute} bytes")
    return Estimate(weights, kv, compute, weights_are_mapped=options.llama.use_mmap)


def estimate_stub(options: LoadOptions) -> Estimate:
    """The stub has cells only."""
    assert options.stub is not None
    kv = 0 if options.vocab_only else options.context.cells * options.stub.bytes_per_token
    return Estimate(0, kv, 0, weights_are_mapped=False)


class Shape:
    """The sizes of a model that memory follows from."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.architecture = header.text("general.architecture")
        self.layers = self._number("block_count")
        if not 0 <= self.layers <= _MAX_LAYERS:
            raise ValueError(f"its head makes no sense: {self.layers} layers")
        self.width = self._number("embedding_length")
        self.feed_forward = self._number("feed_forward_length")
        self.heads = self._number("attention.head_count")
        self.key_heads = header.per_layer(f"{self.architecture}.attention.head_count_kv", self.layers, self.heads)
        head = self.width // self.heads if self.heads else 0
        self.key_width = self._number("attention.key_length", head)
        self.value_width = self._number("attention.value_length", head)
        self.vocabulary = header.lengths.get("tokenizer.ggml.tokens", self._number("vocab_size"))
        self.inner = self._number("ssm.inner_size")
        self.window_tokens = self._number("attention.sliding_window")

    def _number(self, key: str, default: int = 0) -> int:
        return self.header.number(f"{self.architecture}.{key}", default)

    def is_windowed(self, layer: int) -> bool:
        """Does this layer see a window only? Without a pattern in the file none is taken to."""
        key = f"{self.architecture}.attention.sliding_window_pattern"
        if not self.window_tokens:
            return False
        if key in self.header.arrays:
            pattern = self.header.arrays[key]
            return bool(pattern[layer]) if layer < len(pattern) else False
        step = self.header.number(key)
        return bool(step) and (layer + 1) % step != 0

    def state_elements(self) -> int:
        """Numbers of one layer's recurrent state."""
        short = max(0, self._number("shortconv.l_cache") - 1) * self.width
        convolution = max(0, self._number("ssm.conv_kernel") - 1)
        states = self._number("ssm.state_size")
        return short + convolution * (self.inner + 2 * self._number("ssm.group_count") * states) + self.inner * states


def kv_bytes(shape: Shape, opts: ContextOpts) -> int:
    """Cells of every attention layer, and a state of every recurrent one for each sequence."""
    sequences = opts.n_seq_max + HELPER_SEQUENCES
    cells = _padded(opts.cells)
    windowed = cells if opts.swa_full else min(cells, _padded(shape.window_tokens * sequences + opts.ubatch))
    cell_bytes = (
        shape.key_width * _ELEMENT_BYTES[opts.type_k] + shape.value_width * _ELEMENT_BYTES[opts.type_v]
    )  # of one head
    attention = sum(
        (windowed if shape.is_windowed(layer) else cells) * heads * cell_bytes
        for layer, heads in enumerate(shape.key_heads)
    )
    state = shape.state_elements()
    # A model with convolutions in some layers has attention in the others; with a state space, it may have both in each.
    recurrent = sum(1 for heads in shape.key_heads if not heads or shape.inner) if state else 0
    return int(attention) + recurrent * state * sequences * _F32_BYTES


def compute_bytes(shape: Shape, opts: ContextOpts) -> int:
    """Buffers of one graph: masks and scores, the widest rows, and the logits twice, computed and copied."""
    outputs = max(opts.n_seq_max + HELPER_SEQUENCES, MIN_OUTPUTS)
    logits = 2 * outputs * shape.vocabulary * _F32_BYTES
    rows = opts.ubatch * (2 * shape.feed_forward + 5 * shape.width + 6 * shape.inner) * _F32_BYTES
    if not any(shape.key_heads):
        return logits + rows
    masks = 2 if any(shape.is_windowed(layer) for layer in range(shape.layers)) else 1
    pairs = _padded(opts.cells) * opts.ubatch
    # With flash attention the mask has two bytes an entry and no score is stored; without, both have four.
    scores = pairs * 4 * (masks + shape.heads) if opts.flash_attn is False else pairs * 2 * masks
    return logits + rows + scores


def _padded(cells: int) -> int:
    return -(-cells // _CELL_STEP) * _CELL_STEP
