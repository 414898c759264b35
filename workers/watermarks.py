"""What to do about a reading of memory: evict how much, unload, or stop, and why. Pure.

One pass begins when a reading is at or above the high watermark and ends at or below the low one, or says why it could
not. After each step there is a new reading: what eviction frees and what the source sees of it are two things.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from barrel_inference.errors import InvalidArgument

# So many steps in a row that free something without lowering the reading end a pass: more would empty the cache in vain.
FUTILE_STEPS = 2

# A step evicts no more than this part of the total, or the configured minimum: what is freed in vain is little.
STEP_SHARE = 1 / 32

# When every task waited for memory for so much of the last seconds, it is short whatever the byte counts say.
STALLED_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Reading:
    """What a source says."""

    used_bytes: int
    total_bytes: int
    stall_share: float = 0.0  # of the last 10 s: every task waited for memory
    is_gpu: bool = False  # memory that evicting from the host's tiers cannot free

    @property
    def ratio(self) -> float:
        """The share that is used; a source without memory is never under pressure."""
        return self.used_bytes / self.total_bytes if self.total_bytes > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Above `high` a pass begins, at `low` it ends; shares of the source's total."""

    high: float
    low: float


class Action(StrEnum):
    """What a pass does next."""

    EVICT = "evict"
    RELEASE = "release"  # save and free the idle sequences of idle models
    UNLOAD = "unload"  # the least recently used idle model
    END = "end"


@dataclass(frozen=True, slots=True)
class Next:
    """The next step of a pass: `size_bytes` of an eviction, `result` of the end."""

    action: Action
    size_bytes: int = 0
    result: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a pass may do."""

    marks: Watermarks
    min_evict_bytes: int
    may_evict: bool
    may_unload: bool


def watermarks(high: float | None, low: float | None) -> Watermarks:
    """Both watermarks, checked; raises `InvalidArgument` that names the wrong one and its value."""
    for name, value in (("high", high), ("low", low)):
        if value is None:
            raise InvalidArgument(f"{name} is missing", hint="give both watermarks", option=name)
        if math.isnan(value) or not 0 < value <= 1:
            raise InvalidArgument(f"{name} = {value!r} is not above 0 and at most 1", option=name)
    assert high is not None
    assert low is not None
    if low > high:
        raise InvalidArgument(f"low = {low!r} is above high = {high!r}", option="low")
    return Watermarks(high, low)


class Pass:
    """One pass: ask `begin`, do what it says, tell `after` what came of it, until it says END."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._last = Reading(0, 0)
        self._futile = 0
        self._released = False
        self._is_brief = False

    def begin(self, reading: Reading) -> Next:
        """The first step, or the end when nothing is to be done."""
        self._last = reading
        if reading.ratio < self._rules.marks.high:
            if reading.stall_share < STALLED_SHARE or not self._can_evict(reading):
                return Next(Action.END, result="below_high")
            # One small step a pass: that tasks wait does not say how much is missing.
            self._is_brief = True
            return Next(Action.EVICT, size_bytes=max(self._rules.min_evict_bytes, 1))
        return self._evict(reading) if self._can_evict(reading) else self._without_cache(reading)

    def after(self, done: Next, reading: Reading, freed: int) -> Next:
        """The step after `done`, which freed so much (bytes, sequences, models; 0 = there was nothing)."""
        lowered = reading.used_bytes < self._last.used_bytes
        self._last = reading
        if self._is_brief:
            return Next(Action.END, result="stalled" if freed else "exhausted")
        if reading.ratio <= self._rules.marks.low:
            return Next(Action.END, result="relieved")
        # Freed sequences are cells of a context that stays allocated: the reading need not see them.
        if freed and done.action is not Action.RELEASE:
            self._futile = 0 if lowered else self._futile + 1
            if self._futile >= FUTILE_STEPS:
                return Next(Action.END, result="no_effect")
        if done.action is Action.UNLOAD and not freed:
            return Next(Action.END, result="exhausted")
        # What a release or an unload has saved into the cache can be evicted now.
        if self._can_evict(reading) and freed:
            return self._evict(reading)
        return self._without_cache(reading)

    def _can_evict(self, reading: Reading) -> bool:
        return self._rules.may_evict and not reading.is_gpu

    def _evict(self, reading: Reading) -> Next:
        needed = reading.used_bytes - int(self._rules.marks.low * reading.total_bytes)
        step = min(needed, math.ceil(STEP_SHARE * reading.total_bytes))
        return Next(Action.EVICT, size_bytes=max(self._rules.min_evict_bytes, step, 1))

    def _without_cache(self, reading: Reading) -> Next:
        if not self._rules.may_unload:
            return Next(Action.END, result="exhausted")
        if not self._released and not reading.is_gpu:  # a GPU's cells stay allocated until the model is unloaded
            self._released = True
            return Next(Action.RELEASE)
        return Next(Action.UNLOAD)
