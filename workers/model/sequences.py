"""Which sequence holds which tokens, and which one a request may use. Pure.

A sequence is free (empty), warm (idle, its cells kept until someone needs them), pinned (idle, a session's), or busy. `holds`
counts exports under way: until they end, nothing below their end may be cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from barrel_inference.workers.model.chain import Seam, find_seam
from barrel_inference.workers.model.engine import Logits


class Use(StrEnum):
    """What a sequence is used for."""

    FREE = "free"
    WARM = "warm"
    PINNED = "pinned"
    BUSY = "busy"


@dataclass(slots=True)
class Sequence_:
    """One sequence id of the context."""

    id: int
    use: Use = Use.FREE
    tokens: list[int] = field(default_factory=list)  # exactly what its cells hold
    salt: bytes = b""  # of the tenant whose tokens these are
    session: str | None = None
    used: int = 0  # logical time of the last use
    holds: int = 0
    prompt_tokens: int = 0  # how many from the start were its last request's prompt: what follows was generated
    saved_tokens: int = 0  # how many from the start some tier holds or is about to
    logits: Logits = b""  # the row after its first `logits_at` tokens, which are a prompt
    logits_at: int = 0  # 0 = no row was kept

    def forget_logits(self) -> None:
        """Let the kept row go."""
        self.logits, self.logits_at = b"", 0


@dataclass(frozen=True, slots=True)
class Live:
    """The best live match for a prompt."""

    source: int
    seam: Seam


@dataclass(slots=True)
class SequenceTable:
    """All sequences of the context."""

    sequences: list[Sequence_]
    clock: int = 0

    @classmethod
    def of(cls, count: int) -> "SequenceTable":
        """A table of `count` free sequences."""
        return cls([Sequence_(id) for id in range(count)])

    def __getitem__(self, seq: int) -> Sequence_:
        return self.sequences[seq]

    def touch(self, seq: int) -> None:
        """The sequence was used just now."""
        self.clock += 1
        self.sequences[seq].used = self.clock

    def available(self) -> int:
        """How many a new request could get without waiting for another to end."""
        return sum(s.use is not Use.BUSY for s in self.sequences)

    def pinned_idle(self) -> int:
        """How many idle sessions there are."""
        return sum(s.use is Use.PINNED for s in self.sequences)

    def of_session(self, session: str, salt: bytes) -> Sequence_ | None:
        """The sequence that a session of this tenant is pinned to."""
        return next((s for s in self.sequences if s.session == session and s.salt == salt), None)

    def cells(self) -> int:
        """Cells in use at most (shared ones counted for each owner)."""
        return sum(len(s.tokens) for s in self.sequences)

    def best_live(self, prompt: Sequence[int], salt: bytes, rendered: Callable[[int], bytes]) -> Live | None:
        """The sequence of this tenant that shares most with a prompt, idle ones first on a tie."""
        best: Live | None = None
        for s in sorted(self.sequences, key=lambda s: (s.use is Use.BUSY, -s.used)):
            if s.salt != salt or not s.tokens:
                continue
            seam = find_seam(s.tokens, prompt, rendered)
            if seam.stored_tokens and (best is None or seam.caller_tokens > best.seam.caller_tokens):
                best = Live(s.id, seam)
        return best

    def idle_choice(self, *, avoid: int | None = None) -> Sequence_ | None:
        """The sequence that costs least to give up: free, else the least recently used warm one that is not held."""
        idle = [s for s in self.sequences if s.use in (Use.FREE, Use.WARM) and not s.holds and s.id != avoid]
        return min(idle, key=lambda s: (s.use is not Use.FREE, s.used), default=None)

    def oldest_pinned(self) -> Sequence_ | None:
        """The idle session to be reclaimed first."""
        pinned = [s for s in self.sequences if s.use is Use.PINNED and not s.holds]
        return min(pinned, key=lambda s: s.used, default=None)

    def check(self) -> None:
        """The table's invariants."""
        for s in self.sequences:
            assert s.holds >= 0, s
            assert s.use is not Use.FREE or not s.tokens, s
            assert (s.use is Use.PINNED) <= (s.session is not None), s
        sessions = [(s.session, s.salt) for s in self.sequences if s.session is not None]
        assert len(sessions) == len(set(sessions)), sessions
