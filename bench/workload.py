"""What is measured: prompts of a given length, as token ids, so that tokenising takes no part."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

N_CTX = 8192
N_BATCH = 512
THREADS = 2


def prompt(tokens: int, seed: int) -> list[int]:
    """A prompt that shares no prefix with one of another seed. Ids of ordinary words of the model's vocabulary."""
    source = random.Random(seed)
    return [source.randrange(1000, 40_000) for _ in range(tokens)]


@dataclass
class Samples:
    """Raw figures of one cell."""

    unit: str
    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The figure to quote."""
        return statistics.median(self.values)

    def summary(self) -> dict[str, Any]:
        """Median, spread and raw values."""
        ordered = sorted(self.values)
        quarter = len(ordered) // 4
        return asdict(self) | {
            "median": self.median, "min": ordered[0], "low": ordered[quarter], "high": ordered[-1 - quarter],
        }  # fmt: skip


def rate_together(arrivals: Sequence[Sequence[float]]) -> float:
    """Tokens per second of streams that ran at once, from the time (s) of each token of each: counted between the first
    token of the last to start and the last token of the first to end, when all of them generate and nobody prefills."""
    began_s, ended_s = max(one[0] for one in arrivals), min(one[-1] for one in arrivals)
    return sum(began_s < time_s <= ended_s for one in arrivals for time_s in one) / (ended_s - began_s)
