"""One request inside the model process: what it asks, where it stands, what it has produced. Pure data."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from barrel_inference.errors import BarrelError
from barrel_inference.protocol import Complete, HitKind
from barrel_inference.workers.model.engine import Sampler
from barrel_inference.workers.model.text import Scanner

# One death may be anybody's. After a second one, whoever was there both times runs alone: what then dies is to blame.
SUSPECT_DEATHS = 2


class Stage(StrEnum):
    """Where a request stands; also the phase of its progress events."""

    QUEUED = "queued"
    RESOLVING = "resolving"  # the index is asked
    PLACING = "placing"  # waits for a sequence, or for another request that computes the same head
    RESTORING = "restoring"
    PREFILLING = "prefilling"
    GENERATING = "generating"
    ENDED = "ended"


@dataclass(slots=True)
class Hit:
    """How the prefix was found."""

    kind: HitKind = HitKind.COLD
    read_tokens: int = 0
    source: str | None = None
    retokenised: bool = False
    miss_reason: str | None = None
    divergence_byte: int | None = None
    via: str = "none"


@dataclass(slots=True)
class Times:
    """Monotonic instants in seconds; 0 = not yet."""

    arrived_s: float
    admitted_s: float = 0.0
    restore_began_s: float = 0.0
    restored_s: float = 0.0
    prefilled_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0


@dataclass(slots=True)
class Job:
    """One request. `tokens` is the context it wants: the prompt, then what was generated; the sequence holds a prefix of it."""

    id: str
    spec: Complete
    prompt: list[int]
    salt: bytes
    seed: int
    limit_tokens: int  # generated tokens at most
    scanner: Scanner
    times: Times
    attempt: int = 0
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0  # length of the prompt inside `tokens` (stored tokens may have replaced the caller's)
    stage: Stage = Stage.QUEUED
    seq: int | None = None
    sampler: Sampler | None = None
    generated: list[int] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)  # to be taken as the next tokens instead of drawing
    hit: Hit = field(default_factory=Hit)
    finish_reason: str | None = None
    error: BarrelError | None = None
    cancelled: bool = False
    preempted: bool = False  # cells ran out once, and it gave its own up for the others
    cold_saved: bool = False
    pin_saved: bool = False
    load_ns: int = 0  # spent reading, checking and importing stored nodes
    fresh_restore: tuple[tuple[bytes, str], ...] = ()  # copies restored from, until a decode has succeeded on them
    has_emitted: bool = False  # something was handed to its stream
    logprobs: list[dict[str, object]] = field(default_factory=list)

    def begin_context(self, head: Sequence[int], rest: Sequence[int]) -> None:
        """Fix the context: tokens reused from a stored or live prefix, then the rest of prompt and generated tokens."""
        self.tokens = [*head, *rest]
        self.prompt_tokens = len(self.tokens) - len(self.generated)

    @property
    def is_suspect(self) -> bool:
        """Did models die while they computed it, so often that it has to show alone whether it is the cause?"""
        return self.spec.resume is not None and self.spec.resume.deaths >= SUSPECT_DEATHS

    @property
    def is_running(self) -> bool:
        """Does it own a sequence and compute?"""
        return self.stage in (Stage.RESTORING, Stage.PREFILLING, Stage.GENERATING)
