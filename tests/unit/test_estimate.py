"""The memory estimate of a load, from heads of files and options alone."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from barrel_inference.workers.model import memory_room
from barrel_inference.workers.model.estimate import Estimate, estimate
from barrel_inference.workers.model.gguf_header import GgufHeader, read_header
from barrel_inference.workers.model.options import parse

MIB = 1 << 20


def header(**values: int) -> GgufHeader:
    """The head of a model of 100 MiB: 10 layers, width 512, 8 heads of 64 of which 4 hold keys, 1000 tokens."""
    shape = {
        "block_count": 10, "embedding_length": 512, "feed_forward_length": 2048, "attention.head_count": 8,
        "attention.head_count_kv": 4, "attention.key_length": 64, "attention.value_length": 64, **values,
    }  # fmt: skip
    named: dict[str, Any] = {"general.architecture": "llama", **{f"llama.{key}": value for key, value in shape.items()}}
    return GgufHeader(named, {}, {"tokenizer.ggml.tokens": 1000}, MIB, 2 * MIB, 101 * MIB)


def of(settings: dict[str, Any], *headers: GgufHeader, model_opts: Any = None, **context: Any) -> Estimate:
    """The estimate for these options."""
    given = {"model_path": "/m.gguf", "context_opts": context, "model_opts": model_opts}
    return estimate(headers or [header()], parse(given, settings))


def test_cells_cost_what_their_types_say(packaged_settings: dict[str, Any]) -> None:
    """2048 cells of 10 layers with 4 heads of 64 keys and 64 values, in two bytes each; 34 bytes for 32 elements of q8_0."""
    plain = of(packaged_settings)
    assert (plain.weights, plain.kv) == (100 * MIB, 2048 * 10 * 4 * (64 + 64) * 2)
    assert of(packaged_settings, type_k="q8_0", type_v="q8_0").kv == plain.kv * 34 // 64
    assert of(packaged_settings, n_ctx=4096).kv == 2 * plain.kv
    assert of(packaged_settings, n_ctx=2049).kv == plain.kv * 2304 // 2048  # cells come by 256


def test_scores_cost_where_they_are_stored(packaged_settings: dict[str, Any]) -> None:
    """Without flash attention every pair of row and cell has a score for each head."""
    more = of(packaged_settings, flash_attn=False).compute - of(packaged_settings).compute
    assert more == 2048 * 512 * (4 * 8 + 4 - 2)


def test_a_window_saves_cells_only_in_the_small_cache(packaged_settings: dict[str, Any]) -> None:
    """Every third layer sees everything, the others a window of 256 for each of three sequences and a batch."""
    window = header(**{"attention.sliding_window": 256, "attention.sliding_window_pattern": 3})
    full = of(packaged_settings, window, n_ctx=8192)
    small = of(packaged_settings, window, n_ctx=8192, swa_full=False)
    assert full.kv == 10 * 8192 * 1024
    assert small.kv == (3 * 8192 + 7 * 1280) * 1024


def test_all_parts_weigh(packaged_settings: dict[str, Any]) -> None:
    """A split model's first file describes it, the weights are those of all."""
    assert of(packaged_settings, header(), header()).weights == 200 * MIB


def test_a_tokenizer_needs_nothing(packaged_settings: dict[str, Any]) -> None:
    """vocab_only loads neither weights nor a context."""
    assert of(packaged_settings, model_opts={"vocab_only": True}).total == 0


@pytest.mark.parametrize(
    "said",
    [
        {"block_count": 1 << 40}, {"block_count": -1}, {"embedding_length": 1 << 63, "attention.key_length": 1 << 62},
        {"attention.value_length": float("inf")}, {"feed_forward_length": float("nan")}, {"attention.key_length": -(1 << 40)},
    ],
)  # fmt: skip
def test_a_head_that_makes_no_sense(packaged_settings: dict[str, Any], said: dict[str, Any]) -> None:
    """Numbers of a damaged file give an error, not an endless list or a number that cannot be sent."""
    with pytest.raises((ValueError, OverflowError)):
        of(packaged_settings, header(**said))


def test_what_is_cached_need_not_be_found(packaged_settings: dict[str, Any]) -> None:
    """Mapped weights that are in memory already are counted off, read ones are not."""
    mapped, read = of(packaged_settings), of(packaged_settings, model_opts={"use_mmap": False})
    assert mapped.needed(60 * MIB) == mapped.total - 60 * MIB
    assert mapped.needed(1 << 40) == mapped.kv + mapped.compute
    assert read.needed(60 * MIB) == read.total


def test_the_head_of_a_real_file(tiny_models: Mapping[str, Path]) -> None:
    """Numbers, texts, one number for each layer, and how many tokens there are."""
    found = read_header(tiny_models["hybrid"])
    assert found.text("general.architecture") == "lfm2"
    assert found.per_layer("lfm2.attention.head_count_kv", 3) == [0, 1, 0]
    assert found.per_layer("lfm2.block_count", 2) == [3, 3]
    assert found.lengths["tokenizer.ggml.tokens"] == found.number("lfm2.vocab_size")
    assert (found.number("nothing", 7), found.text("nothing")) == (7, "")
    assert 0 < found.data_start < found.first_tensor_end < found.size_bytes


def test_a_long_head_is_read_to_its_end(tmp_path: Path) -> None:
    """A head of several megabytes needs more than the first read."""
    text = b"x" * (3 * MIB)
    head = struct.pack("<IIQQ", 0x46554747, 3, 0, 2)
    for key, value in ((b"long", text), (b"last", b"end")):
        head += struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    (tmp_path / "long.gguf").write_bytes(head)
    assert read_header(tmp_path / "long.gguf").text("last") == "end"
    (tmp_path / "cut.gguf").write_bytes(head[:-1])
    with pytest.raises(EOFError):
        read_header(tmp_path / "cut.gguf")


def test_the_refusal_has_the_numbers(
    tiny_models: Mapping[str, Path], packaged_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is what the machine and its control groups say; less than needed does not fit."""
    options = parse({"model_path": str(tiny_models["dense"]), "model_opts": {"use_mmap": False}}, packaged_settings)
    room = memory_room.room_for(options)
    assert room.fits
    monkeypatch.setattr(memory_room, "free_memory_bytes", lambda: room.needed - 1)
    tight = memory_room.room_for(options)
    assert not tight.fits
    refusal = tight.refusal("m")
    assert (refusal.code, refusal.details["needed"], refusal.details["available"]) == (
        "bad_model",
        room.needed,
        room.needed - 1,
    )
