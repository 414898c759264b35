"""Load options are checked completely before a process starts, and every refusal names the key and the value."""

from typing import Any

import pytest

from barrel_inference.errors import InvalidArgument
from barrel_inference.protocol import Tier
from barrel_inference.workers.model.options import MAX_SEQUENCES, STUB_THINKING, LoadOptions, Markers, parse


def parsed(settings: dict[str, Any], **given: Any) -> LoadOptions:
    """The options of a model called `m`."""
    return parse({"model_path": "m", **given}, settings)


def test_the_defaults_are_those_of_the_guide(packaged_settings: dict[str, Any]) -> None:
    """Nothing given: every default of the loading guide, and saves go to the RAM tier."""
    got = parsed(packaged_settings)
    assert got.llama is not None
    assert (got.llama.n_gpu_layers, got.llama.split_mode, got.llama.use_mmap, got.llama.use_mlock) == (
        0,
        "layer",
        True,
        False,
    )
    assert (got.context.n_ctx, got.context.n_batch, got.context.ubatch, got.context.n_seq_max) == (2048, 512, 512, 1)
    assert (got.context.flash_attn, got.context.type_k, got.context.type_v) == ("auto", "f16", "f16")
    assert (got.context.cells, got.context.warm) == (2048, 1024)
    assert (got.tier, got.tier_server, got.fingerprint_mode) == (Tier.RAM, "tier:ram", "safe")
    assert got.policy["min_tokens"] == 512
    assert got.policy["session_resume_wait_ms"] == 500


def test_defaults_follow_other_options(packaged_settings: dict[str, Any]) -> None:
    """Cells follow n_ctx, warm cells the cells, micro-batches the batch, the context's size `context_size`."""
    got = parsed(packaged_settings, context_size=4096, context_opts={"n_batch": 64, "kv_cells": 10_000})
    assert (got.context.n_ctx, got.context.cells, got.context.warm, got.context.ubatch) == (4096, 10_000, 5_000, 64)


def test_the_configured_fingerprint_mode_is_the_default(packaged_settings: dict[str, Any]) -> None:
    """`cache.fingerprint_mode` counts where a load says nothing."""
    settings = {**packaged_settings, "cache": {**packaged_settings["cache"], "fingerprint_mode": "gguf_chunked"}}
    assert parsed(settings).fingerprint_mode == "gguf_chunked"
    assert parsed(settings, fingerprint_mode="fast_unsafe").fingerprint_mode == "fast_unsafe"


def test_given_gates_lie_over_the_configured_ones(packaged_settings: dict[str, Any]) -> None:
    """A policy changes the gates that it names and keeps the others."""
    got = parsed(packaged_settings, policy={"min_tokens": 4, "session_resume_wait_ms": 50})
    assert (got.policy["min_tokens"], got.policy["session_resume_wait_ms"], got.policy["cold_min_tokens"]) == (
        4,
        50,
        512,
    )


@pytest.mark.parametrize("given", [b"\xaa" * 32, "aa" * 32])
def test_digests_are_bytes_or_hexadecimal(packaged_settings: dict[str, Any], given: bytes | str) -> None:
    """Configuration files and the command line have no bytes."""
    got = parsed(packaged_settings, fingerprint=given, ctx_params_hash=given)
    assert got.fingerprint == got.ctx_params_hash == b"\xaa" * 32


@pytest.mark.parametrize("given", [["<think>", "</think>"], {"start": "<think>", "end": "</think>"}])
def test_markers_are_a_pair_or_a_table(packaged_settings: dict[str, Any], given: Any) -> None:
    """Both spellings mean the same."""
    got = parsed(packaged_settings, thinking_markers=given, tool_call_markers=given)
    assert got.thinking_markers == got.tool_call_markers == Markers(start="<think>", end="</think>")


def test_a_tier_of_ones_own_is_named_by_tier_srv(packaged_settings: dict[str, Any]) -> None:
    """A server of the right kind is taken, with or without the prefix of its process."""
    tiers = {**packaged_settings["tiers"], "archive": {"kind": "disk"}}
    for name in ("archive", "tier:archive"):
        got = parsed({**packaged_settings, "tiers": tiers}, tier="disk", tier_srv=name)
        assert got.tier_server == "tier:archive"


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("model_opts", "split_mode", "diagonal"),
        ("model_opts", "main_gpu", 16),
        ("model_opts", "main_gpu", -1),
        ("model_opts", "tensor_split", [1.0] * 17),
        ("model_opts", "tensor_split", [0.0, 0.0]),
        ("model_opts", "tensor_split", [0.5, -0.5]),
        ("model_opts", "use_mmap", "yes"),
        ("model_opts", "n_gpu_layers", 1.5),
        ("model_opts", "n_gpu_layer", 1),
        ("context_opts", "n_ctx", 0),
        ("context_opts", "n_ctx", 2**31),
        ("context_opts", "n_ctx", "2048"),
        ("context_opts", "n_batch", -1),
        ("context_opts", "n_ubatch", 1024),
        ("context_opts", "n_seq_max", MAX_SEQUENCES + 1),
        ("context_opts", "n_seq_max", 0),
        ("context_opts", "kv_cells", 100),
        ("context_opts", "warm_cells", 4096),
        ("context_opts", "n_threads", 0),
        ("context_opts", "flash_attn", "maybe"),
        ("context_opts", "type_k", "q9_9"),
        ("context_opts", "type_v", "int8"),
        ("context_opts", "rope_freq_base", float("nan")),
        ("context_opts", "rope_scaling", "cubic"),
        ("context_opts", "nope", None),
    ],
)
def test_bad_options_are_named_with_their_value(
    packaged_settings: dict[str, Any], group: str, key: str, value: Any
) -> None:
    """The dotted key and the value stand in the text."""
    with pytest.raises(InvalidArgument) as refused:
        parsed(packaged_settings, **{group: {key: value}})
    assert f"{group}.{key}" in refused.value.message
    assert repr(value) in refused.value.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("backend", "gpu"),
        ("tier", "tape"),
        ("tier_srv", "nowhere"),
        ("tier_srv", "disk"),  # of another kind than `tier`
        ("fingerprint", b"\xaa"),
        ("fingerprint", "xyz"),
        ("fingerprint", 5),
        ("fingerprint_mode", "trusting"),
        ("quant_type", ""),
        ("quant_bits", 65),
        ("ctx_params_hash", "aa" * 31),
        ("context_size", 0),
        ("thinking_markers", ["<think>"]),
        ("thinking_markers", ["", "x"]),
        ("tool_call_markers", "<tool>"),
        ("policy", {"cold_min_tokens": 100, "cold_max_tokens": 100}),
        ("policy", {"boundary_align_tokens": 0}),
        ("policy", {"colour": 1}),
        ("adapters", [("a.gguf",)]),
        ("adapters", [("a.gguf", float("inf"))]),
        ("adapters", [("", 1.0)]),
        ("modle_opts", {}),
        ("autoload", True),  # of a [models.NAME] table only
    ],
)
def test_bad_top_level_options_are_named(packaged_settings: dict[str, Any], key: str, value: Any) -> None:
    """The key stands in the text."""
    with pytest.raises(InvalidArgument, match=key):
        parsed(packaged_settings, **{key: value})


def test_a_model_needs_a_path(packaged_settings: dict[str, Any]) -> None:
    """Without one, or with an empty one, the text says so."""
    with pytest.raises(InvalidArgument, match="model_path"):
        parse({}, packaged_settings)
    with pytest.raises(InvalidArgument, match="model_path"):
        parse({"model_path": ""}, packaged_settings)


def test_a_tier_that_is_off_is_refused(packaged_settings: dict[str, Any]) -> None:
    """Saves to it would silently go nowhere."""
    tiers = {**packaged_settings["tiers"], "ram": {"enabled": False}}
    with pytest.raises(InvalidArgument, match="switched off"):
        parsed({**packaged_settings, "tiers": tiers})


def test_quantised_values_need_flash_attention(packaged_settings: dict[str, Any]) -> None:
    """llama.cpp makes no such context; the reason is known beforehand."""
    with pytest.raises(InvalidArgument, match="flash"):
        parsed(packaged_settings, context_opts={"flash_attn": False, "type_v": "q8_0"})


def test_two_sizes_of_the_context_must_agree(packaged_settings: dict[str, Any]) -> None:
    """`context_size` is a copy of n_ctx."""
    with pytest.raises(InvalidArgument, match=r"context_size = 5 differs from context_opts\.n_ctx = 6"):
        parsed(packaged_settings, context_size=5, context_opts={"n_ctx": 6})


def test_the_option_that_was_meant_is_named(packaged_settings: dict[str, Any]) -> None:
    """A misspelt one is answered with the nearest, a strange one with all there are."""
    with pytest.raises(
        InvalidArgument, match=r"context_opts\.n_ctxx = 1 is no option — did you mean context_opts\.n_ctx\?"
    ):
        parsed(packaged_settings, context_opts={"n_ctxx": 1})
    with pytest.raises(InvalidArgument, match=r"there are .*use_mlock"):
        parsed(packaged_settings, model_opts={"zzz": 1})
    with pytest.raises(InvalidArgument, match=r"policy\.min_token = 5 is no gate; there are min_tokens"):
        parsed(packaged_settings, policy={"min_token": 5})


def test_choices_are_listed(packaged_settings: dict[str, Any]) -> None:
    """A wrong word is answered with the right ones."""
    with pytest.raises(InvalidArgument, match="none, row"):
        parsed(packaged_settings, model_opts={"split_mode": "x"})
    with pytest.raises(InvalidArgument, match="true, false, auto"):
        parsed(packaged_settings, context_opts={"flash_attn": 3})


def test_the_stub_has_options_of_its_own(packaged_settings: dict[str, Any]) -> None:
    """It takes faults, and no GPU layers."""
    got = parsed(packaged_settings, backend="stub", model_opts={"step_ms": 5, "decode_failed_at": 3})
    assert got.llama is None
    assert got.stub is not None
    assert (got.stub.step_ms, got.stub.decode_failed_at) == (5, 3)
    assert got.thinking_markers is None
    assert (
        parsed(packaged_settings, backend="stub", model_opts={"thinking_tokens": 3}).thinking_markers == STUB_THINKING
    )
    with pytest.raises(InvalidArgument, match="n_gpu_layers"):
        parsed(packaged_settings, backend="stub", model_opts={"n_gpu_layers": 1})
