"""When a prefix is saved, and up to where. Pure.

The gates and their defaults are those of the caching guide. `None` in a mapping stands for infinity.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from barrel_inference.errors import InvalidArgument

_DEFAULT_REUSE_TOKENS = 32  # below, reading and importing a prefix costs more than computing it


@dataclass(frozen=True, slots=True)
class Policy:
    """The gates of one model; token counts, `math.inf` where that is allowed."""

    min_tokens: float = 512  # nothing shorter is saved; inf = nothing at all
    cold_min_tokens: float = 512
    cold_max_tokens: float = 30_000
    continued_interval: float = 2048
    boundary_trim_tokens: int = 32
    boundary_align_tokens: int = 2048
    session_resume_wait_ms: int = 500
    min_reuse_tokens: int = _DEFAULT_REUSE_TOKENS  # `sys.maxsize` for inf: whole prompts only
    prefill_chunk_size: int = 128
    store_logits: bool = False  # with a prompt's end: an identical prompt then needs no decode for its first token

    def cold_boundary(self, prompt_tokens: int) -> int:
        """Where a cold save ends: trimmed, then rounded down to the alignment; 0 = nothing is left."""
        left = prompt_tokens - self.boundary_trim_tokens
        return left // self.boundary_align_tokens * self.boundary_align_tokens if left > 0 else 0

    @property
    def saves_nothing(self) -> bool:
        """Are all gates closed? Then what ends a session or a model saves nothing either."""
        return self.min_tokens == math.inf

    def wants_cold(self, prompt_tokens: int) -> bool:
        """Is a cold prompt of this length saved?"""
        return self.min_tokens <= prompt_tokens and self.cold_min_tokens <= prompt_tokens <= self.cold_max_tokens

    def wants_continued(self, tokens: int, last_tokens: int) -> bool:
        """Is it time for a continued save? `last_tokens`: the last save's length, or the prompt's."""
        return tokens >= self.min_tokens and tokens - last_tokens >= self.continued_interval

    def wants_finish(self, tokens: int) -> bool:
        """Is a finished context of this length saved?"""
        return tokens >= self.min_tokens


# The least that a gate may be, and whether it may be infinite.
_COUNTS = {
    "min_tokens": (0, True),
    "cold_min_tokens": (0, True),
    "cold_max_tokens": (0, True),
    "continued_interval": (1, True),
    "boundary_trim_tokens": (0, False),
    "boundary_align_tokens": (1, False),
}
# These have a default of their own, which may depend on others.
_OPTIONAL = {"session_resume_wait_ms": (0, False), "min_reuse_tokens": (1, True), "prefill_chunk_size": (1, True)}


def validate(mapping: Mapping[str, Any]) -> list[str]:
    """Every problem of a complete set of gates, each naming its key and value."""
    problems = [f"policy.{name} is missing" for name in _COUNTS if name not in mapping]
    for name, value in mapping.items():
        problems += _problem(name, value)
    low, high = _number(mapping.get("cold_min_tokens", 0)), _number(mapping.get("cold_max_tokens", None))
    if not problems and low >= high:
        problems.append(f"policy.cold_min_tokens = {low:g} has to be below cold_max_tokens = {high:g}")
    return problems


def make(mapping: Mapping[str, Any], *, n_batch: int) -> Policy:
    """The gates of a model, completed.

    Raises:
        InvalidArgument: names the key and the value.
    """
    if problems := validate(mapping):
        raise InvalidArgument("; ".join(problems))
    min_tokens = _number(mapping["min_tokens"])
    reuse = _number(mapping.get("min_reuse_tokens", min(_DEFAULT_REUSE_TOKENS, min_tokens)))
    wait_ms = mapping.get("session_resume_wait_ms")
    chunk = mapping.get("prefill_chunk_size", max(64, n_batch // 4))
    return Policy(
        min_tokens=min_tokens,
        cold_min_tokens=_number(mapping["cold_min_tokens"]),
        cold_max_tokens=_number(mapping["cold_max_tokens"]),
        continued_interval=_number(mapping["continued_interval"]),
        boundary_trim_tokens=mapping["boundary_trim_tokens"],
        boundary_align_tokens=mapping["boundary_align_tokens"],
        session_resume_wait_ms=500 if wait_ms is None else wait_ms,
        min_reuse_tokens=sys.maxsize if reuse == math.inf else max(1, int(reuse)),
        prefill_chunk_size=n_batch if chunk is None or chunk == math.inf else chunk,
        store_logits=mapping.get("store_logits", False),
    )


def _number(value: int | float | None) -> float:
    return math.inf if value is None else value


def _problem(name: str, value: Any) -> list[str]:
    if name == "store_logits":
        return [] if isinstance(value, bool) else [f"policy.store_logits = {value!r} is neither true nor false"]
    limits = _COUNTS.get(name) or _OPTIONAL.get(name)
    if limits is None:
        return [f"policy.{name} = {value!r} is no gate; there are {', '.join((*_COUNTS, *_OPTIONAL))}, store_logits"]
    least, may_be_infinite = limits
    if value is None and (may_be_infinite or name in _OPTIONAL):
        return []
    if may_be_infinite and value == math.inf:
        return []
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return []
    return [f"policy.{name} = {value!r} is no whole number of at least {least}{' or inf' if may_be_infinite else ''}"]
