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


@dataclass(frozen=True, slots=True)
class Reading:
    """What a source says."""

    used_bytes: int
    total_bytes: int

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

    def begin(self, reading: Reading) -> Next:
        """The first step, or the end when nothing is to be done."""
        self._last = reading
        if reading.ratio < self._rules.marks.high:
            return Next(Action.END, result="below_high")
        return self._evict(reading) if self._rules.may_evict else self._without_cache()

    def after(self, done: Next, reading: Reading, freed: int) -> Next:
        """The step after `done`, which freed so much (bytes, sequences, models; 0 = there was nothing)."""
        lowered = reading.used_bytes < self._last.used_bytes
        self._last = reading
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
        if self._rules.may_evict and freed:
            return self._evict(reading)
        return self._without_cache()

    def _evict(self, reading: Reading) -> Next:
        low_bytes = int(self._rules.marks.low * reading.total_bytes)
        return Next(Action.EVICT, size_bytes=max(self._rules.min_evict_bytes, reading.used_bytes - low_bytes, 1))

    def _without_cache(self) -> Next:
        if not self._rules.may_unload:
            return Next(Action.END, result="exhausted")
        if not self._released:
            self._released = True
            return Next(Action.RELEASE)
        return Next(Action.UNLOAD)
