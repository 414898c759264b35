"""When a prefix is saved, and up to where."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barrel_inference.config import defaults_text, parse
from barrel_inference.errors import InvalidArgument
from barrel_inference.tiers import policy as policies
from barrel_inference.tiers.policy import Policy

DEFAULTS: dict[str, Any] = {
    "min_tokens": 512, "cold_min_tokens": 512, "cold_max_tokens": 30_000, "continued_interval": 2048,
    "boundary_trim_tokens": 32, "boundary_align_tokens": 2048,
}  # fmt: skip


@given(st.integers(0, 100_000), st.integers(0, 3000), st.integers(1, 4096))
def test_cold_boundary(tokens: int, trim: int, align: int) -> None:
    """The boundary is a multiple of align, drops at least trim tokens, and is nothing exactly when less than align is left."""
    boundary = Policy(boundary_trim_tokens=trim, boundary_align_tokens=align).cold_boundary(tokens)
    assert boundary % align == 0
    assert boundary <= max(0, tokens - trim)
    assert (boundary == 0) == (tokens - trim < align)
    assert boundary == 0 or tokens - trim - boundary < align


@pytest.mark.parametrize(
    ("tokens", "last", "wanted"), [(3048, 2048, False), (4096, 2048, True), (400, 0, False), (2560, 512, True)]
)
def test_continued(tokens: int, last: int, wanted: bool) -> None:
    """A continued save comes every interval, counted from the last save, and never below the minimum."""
    assert Policy().wants_continued(tokens, last) is wanted


@pytest.mark.parametrize(("tokens", "wanted"), [(400, False), (511, False), (512, True), (8192, True)])
def test_finish(tokens: int, wanted: bool) -> None:
    """A finish save needs the minimum only."""
    assert Policy().wants_finish(tokens) is wanted


@pytest.mark.parametrize(("tokens", "wanted"), [(511, False), (512, True), (30_000, True), (30_001, False)])
def test_cold_band(tokens: int, wanted: bool) -> None:
    """A cold save needs a length within the band, ends included."""
    assert Policy().wants_cold(tokens) is wanted


def test_infinite_minimum_saves_nothing() -> None:
    """With `min_tokens` infinite no gate ever opens."""
    never = Policy(min_tokens=math.inf)
    assert not any((never.wants_cold(20_000), never.wants_continued(20_000, 0), never.wants_finish(20_000)))


def test_defaults_are_those_of_the_packaged_file() -> None:
    """The policy of the packaged configuration is the one of the code."""
    tables = parse(defaults_text())
    assert policies.make(tables["cache"]["policy"], n_batch=512) == Policy(prefill_chunk_size=128)


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_missing_gate_is_named(name: str) -> None:
    """An incomplete set of gates is refused with the name of what is missing."""
    [problem] = policies.validate({key: value for key, value in DEFAULTS.items() if key != name})
    assert name in problem


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cold_min_tokens", 30_000), ("boundary_align_tokens", 0), ("continued_interval", 0), ("min_tokens", -1),
        ("boundary_trim_tokens", -1), ("min_tokens", 1.5), ("min_tokens", True), ("min_tokens", "many"),
        ("prefill_chunk_size", 0), ("min_reuse_tokens", 0), ("store_logits", 1), ("cold_max_tokens", math.nan),
        ("continued_interval", -math.inf), ("ladder", 3),
    ],
)  # fmt: skip
def test_bad_value_is_named(name: str, value: object) -> None:
    """A bad gate is refused with its key and its value, at once and alone."""
    [problem] = policies.validate({**DEFAULTS, name: value})
    assert name in problem
    assert f"{value!r}" in problem or f"{value}" in problem
    with pytest.raises(InvalidArgument, match=name):
        policies.make({**DEFAULTS, name: value}, n_batch=512)


def test_every_problem_is_reported() -> None:
    """Two bad gates are two problems."""
    assert len(policies.validate({**DEFAULTS, "continued_interval": 0, "boundary_align_tokens": -3})) == 2


LIMITS = st.one_of(st.none(), st.just(math.inf), st.integers(0, 10**6))


@given(
    st.fixed_dictionaries(
        {
            "min_tokens": LIMITS,
            "cold_min_tokens": st.integers(0, 1000),
            "cold_max_tokens": st.one_of(st.none(), st.just(math.inf), st.integers(1001, 10**6)),
            "continued_interval": st.one_of(st.none(), st.just(math.inf), st.integers(1, 10**6)),
            "boundary_trim_tokens": st.integers(0, 10**4),
            "boundary_align_tokens": st.integers(1, 10**4),
        },
        optional={
            "session_resume_wait_ms": st.integers(0, 10**4),
            "min_reuse_tokens": st.one_of(st.none(), st.just(math.inf), st.integers(1, 100)),
            "prefill_chunk_size": st.one_of(st.none(), st.just(math.inf), st.integers(1, 10**4)),
            "store_logits": st.booleans(),
        },
    )
)
def test_valid_policies_are_made(mapping: dict[str, Any]) -> None:
    """Any set of values that the requirement allows becomes a policy, infinity as None or as a float."""
    assert policies.validate(mapping) == []
    made = policies.make(mapping, n_batch=512)
    assert made.min_tokens == (math.inf if mapping["min_tokens"] is None else mapping["min_tokens"])
    assert made.min_reuse_tokens >= 1
    assert made.prefill_chunk_size >= 1


@pytest.mark.parametrize(("n_batch", "chunk"), [(1024, 256), (64, 64), (512, 128)])
def test_chunk_follows_the_batch(n_batch: int, chunk: int) -> None:
    """Without a value, a slice is a quarter of the batch and at least 64; infinite means the whole batch."""
    assert policies.make(DEFAULTS, n_batch=n_batch).prefill_chunk_size == chunk
    assert policies.make({**DEFAULTS, "prefill_chunk_size": None}, n_batch=n_batch).prefill_chunk_size == n_batch


@pytest.mark.parametrize(("min_tokens", "reuse"), [(512, 32), (4, 4), (0, 1), (math.inf, 32)])
def test_least_reuse_follows_the_minimum(min_tokens: float, reuse: int) -> None:
    """Without a value, the shortest reuse is the smaller of 32 and the minimum for saves."""
    assert policies.make({**DEFAULTS, "min_tokens": min_tokens}, n_batch=512).min_reuse_tokens == reuse


@pytest.mark.parametrize("infinite", [None, math.inf])
def test_infinite_reuse_wants_whole_prompts(infinite: float | None) -> None:
    """An infinite shortest reuse is longer than any prefix."""
    assert policies.make({**DEFAULTS, "min_reuse_tokens": infinite}, n_batch=512).min_reuse_tokens > 10**9


def test_saves_nothing() -> None:
    """Only an infinite `min_tokens` closes every gate."""
    assert policies.make(DEFAULTS | {"min_tokens": None}, n_batch=512).saves_nothing
    assert not policies.make(DEFAULTS | {"min_tokens": 10**9}, n_batch=512).saves_nothing
