"""Restart accounting: may this child be started again, and after what delay? Pure.

Time in a window is *served* time: seconds that the child has been ready, in total. A model that takes a minute to load and
dies a second later dies once per served second, whatever the wall clock says; and no delay can outlast the window.
"""

from collections import deque
from dataclasses import dataclass, field

# The first delay. Shorter than anybody notices, long enough that a child that dies at once does not fill a core.
FIRST_DELAY_S = 0.05


@dataclass(frozen=True, slots=True)
class Intensity:
    """At most `max_restarts` restarts in any span of `period_s` served seconds."""

    max_restarts: int
    period_s: float

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must be >= 0, got {self.max_restarts}")
        if self.period_s <= 0:
            raise ValueError(f"period_s must be > 0, got {self.period_s}")


@dataclass(slots=True)
class RestartWindow:
    """The deaths of one child that still count."""

    period_s: float
    _at_s: deque[float] = field(default_factory=deque)

    def note(self, served_s: float) -> None:
        """Record a death after `served_s` seconds of being ready in all its incarnations together."""
        self._at_s.append(served_s)

    def count(self, served_s: float) -> int:
        """How many deaths lie less than the period back, in served time."""
        while self._at_s and self._at_s[0] <= served_s - self.period_s:
            self._at_s.popleft()
        return len(self._at_s)


def delay_s(deaths: int, max_s: float) -> float:
    """How long to wait before the restart after the `deaths`-th death in the window."""
    # The exponent is bounded because a float overflows at 2**1024.
    return float(min(max_s, FIRST_DELAY_S * 2 ** min(max(deaths, 1) - 1, 60)))
