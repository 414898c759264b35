"""What the engine thread asks of the I/O thread, and what it gets back, in words. Pure.

Every method may be called from the engine thread and returns at once; answers come back as calls of the scheduler's own
methods, through `Scheduler.post`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from barrel_inference.protocol import SaveReason
from barrel_inference.workers.model.chain import NO_SEAM, Seam
from barrel_inference.workers.model.engine import Logits
from barrel_inference.workers.model.job import Job
from barrel_inference.workers.model.text import Piece


@dataclass(frozen=True, slots=True)
class StoredNode:
    """One stored node, opened and verified, ready to be imported."""

    key: bytes
    server: str
    source: str  # kind of its tier
    start: int
    end: int
    cells: memoryview
    snapshot: memoryview | None
    logits: memoryview | None  # the row after its last token
    is_intact: Callable[[], bool]  # after the import: is the slab still the same one?
    open_ns: int = 0  # what reading and checking it took


@dataclass(frozen=True, slots=True)
class ComingNode:
    """One stored node of a match, being opened and verified on another thread."""

    start: int
    end: int
    opened: "Future[StoredNode | None]"  # None: no copy of it can be read


@dataclass(frozen=True, slots=True)
class Found:
    """What the index and the tiers have for a prompt."""

    claim: int = 0
    salt: bytes = b""  # of the tenant who asked
    tokens: tuple[int, ...] = ()  # the stored tokens along the path
    seam: Seam = NO_SEAM
    nodes: tuple[ComingNode, ...] = ()
    via: str = "none"
    miss_reason: str | None = None
    divergence_byte: int | None = None


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Save the first `len(tokens)` tokens of a sequence. The sequence is held until `Scheduler.save_packed`."""

    seq: int
    tokens: tuple[int, ...]
    salt: bytes
    reason: SaveReason
    snapshots: dict[int, bytes]  # state by position, for models that need it
    logits: tuple[int, Logits] | None  # a position at which to end a node, and the row to store with it
    job: Job | None = None
    pinned: bool = False
    # Engine thread: every node is published, or given up, or `evict_save_timeout_ms` are over.
    on_published: Callable[[], None] | None = None


class Effects(Protocol):
    """The I/O side."""

    def resolve(self, job: Job, live_tokens: int) -> None:
        """Look the prompt up, of which so much is live; answered by `Scheduler.resolved(job, found)`."""

    def check_in(self, found: Found, used: Sequence[StoredNode], corrupt: Sequence[StoredNode]) -> None:
        """Drop the claim and say what became of it."""

    def save(self, order: SaveOrder) -> None:
        """Save; answered by `Scheduler.save_packed(seq)` when no more cells are needed."""

    def emit(self, job: Job, pieces: Sequence[Piece]) -> None:
        """Stream to the caller."""

    def ended(self, job: Job, context: tuple[int, ...]) -> None:
        """The request is over; its saves may still be under way. `context` is what its sequence holds."""

    def computes(self, job: Job) -> None:
        """From now on the request may be the one that kills us."""

    def rests(self, job: Job) -> None:
        """It waits, or has ended."""

    def changed(self) -> None:
        """Something that observers see has changed."""

    def crashed(self, error: BaseException) -> None:
        """A bug in the engine thread: the process must end."""
