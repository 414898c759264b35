"""Bringing a stored prefix into a sequence, node by node. Runs on the engine thread.

Every step leaves a state that can be computed on: whatever could not be imported is computed instead.
"""

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future

from barrel_inference.protocol import HitKind
from barrel_inference.workers.model import grid
from barrel_inference.workers.model.chain import Seam, common_prefix, find_seam
from barrel_inference.workers.model.context import Context
from barrel_inference.workers.model.effects import Effects, Found, StoredNode
from barrel_inference.workers.model.engine import NoCells
from barrel_inference.workers.model.job import Job
from barrel_inference.workers.model.placement import Abilities
from barrel_inference.workers.model.sequences import Sequence_


def live_part(context: Context, s: Sequence_, found: Found) -> int:
    """How much of a stored prefix a sequence holds already, up to where one of its nodes begins: that is not read again."""
    if context.engine.info.needs_snapshot or s.salt != found.salt:
        return 0
    held = common_prefix(s.tokens, found.tokens)
    begin = max((node.start for node in found.nodes if node.start <= held), default=0)
    return begin if begin and context.engine.can_cut(s.id, begin) else 0


def let_go(found: Found) -> None:
    """What was not opened yet is not needed any more."""
    for coming in found.nodes:
        coming.opened.cancel()


class Restore:
    """One restore. Call `step` until it says that it is over; then `used` are the nodes that the sequence goes on from."""

    def __init__(
        self, context: Context, effects: Effects, job: Job, s: Sequence_, found: Found, *, able: Abilities,
        then: Callable[[], None],
    ) -> None:  # fmt: skip
        self._context = context
        self._effects = effects
        self._job = job
        self._s = s
        self._found = found
        self._able = able
        self.used: list[StoredNode] = []
        self.corrupt: list[StoredNode] = []
        self.awaited: Future[StoredNode | None] | None = None  # the last step could do nothing before this is done
        self._checked_in = False
        self._steps = self._run(then)

    def step(self) -> bool:
        """Import one node; False when it is over."""
        return next(self._steps, None) is not None

    def close(self) -> None:
        """The request ends in the middle, or before the first step."""
        self._steps.close()
        self._check_in()

    def _check_in(self) -> None:
        """Drop the claim, once."""
        if not self._checked_in:
            self._checked_in = True
            let_go(self._found)
            self._effects.check_in(self._found, self.used, self.corrupt)

    def _run(self, then: Callable[[], None]) -> Generator[bool, None, None]:
        """Import the nodes, cut at the seam, and call `then`; the claim is dropped however it ends."""
        live_tokens = len(self._s.tokens)
        try:
            for coming in self._found.nodes:
                if coming.start < live_tokens:
                    continue
                while not coming.opened.done():
                    self.awaited = coming.opened
                    yield True
                self.awaited = None
                node = coming.opened.result()
                if node is None:
                    break
                if not self._import(node):
                    self.corrupt.append(node)
                    break
                self.used.append(node)
                yield True
            self._settle()
        finally:
            self._check_in()
        self._job.fresh_restore = tuple((node.key, node.server) for node in self.used)
        then()

    def _import(self, node: StoredNode) -> bool:
        s, engine = self._s, self._context.engine
        began_ns = time.perf_counter_ns()
        try:
            taken = self._context.with_room(lambda: engine.import_cells(s.id, node.start, node.end, node.cells))
        except NoCells:
            return False
        finally:
            self._job.load_ns += node.open_ns + time.perf_counter_ns() - began_ns
        logits = bytes(node.logits) if node.logits is not None and node.end == self._found.seam.stored_tokens else b""
        if not taken or not node.is_intact():
            self._context.cut(s, node.start)
            return False
        s.tokens = list(self._found.tokens[: node.end])
        if logits:
            s.logits, s.logits_at = logits, node.end
        return True

    def _settle(self) -> None:
        """Cut the imported prefix at the seam, or at what could be imported of it."""
        job, s, found = self._job, self._s, self._found
        wanted = [*job.prompt, *job.generated]
        seam = found.seam
        is_whole = len(s.tokens) >= seam.stored_tokens
        if not is_whole:  # a node was unreadable: what came before it is a shorter match
            seam = self._seam(wanted)
        keep = seam.stored_tokens
        if seam.caller_tokens == len(wanted) and s.logits_at != keep:
            seam, keep = grid.without_logits(seam, self._able.grid_tokens)
        if self._context.engine.info.needs_snapshot:
            keep = self._set_snapshot(keep)
            seam = self._seam(wanted) if keep < seam.stored_tokens - 1 else seam
        elif keep < len(s.tokens) and not self._context.cut(s, keep):
            keep = 0
        if keep <= 0 or (seam.caller_tokens < self._able.min_reuse_tokens and seam.caller_tokens < len(wanted)):
            self._context.clear(s)
            job.begin_context((), wanted)
            job.hit.miss_reason = "unreadable"
            return
        s.saved_tokens = len(s.tokens)
        job.begin_context(found.tokens[: seam.stored_tokens], wanted[seam.caller_tokens :])
        job.hit.kind = HitKind.EXACT if seam.caller_tokens == len(wanted) else HitKind.PARTIAL
        job.hit.read_tokens = seam.stored_tokens
        job.hit.retokenised, job.hit.via = seam.retokenised, found.via
        job.hit.miss_reason = job.hit.divergence_byte = None
        if job.hit.kind is HitKind.PARTIAL:
            job.hit.miss_reason = "diverged" if is_whole else "unreadable"
            job.hit.divergence_byte = found.divergence_byte
        job.hit.source = self.used[-1].source if self.used else "live"

    def _seam(self, wanted: list[int]) -> Seam:
        return find_seam(self._s.tokens, wanted, self._context.engine.rendered)

    def _set_snapshot(self, keep: int) -> int:
        """Resume at the last snapshot at or before `keep`; returns where that is."""
        s = self._s
        for node in reversed(self.used):
            if node.snapshot is not None and node.end <= keep:
                snapshot = bytes(node.snapshot)
                if node.is_intact() and self._context.engine.import_snapshot(s.id, node.end, memoryview(snapshot)):
                    s.tokens = s.tokens[: node.end]
                    if s.logits_at > node.end:
                        s.forget_logits()
                    self._context.snapshots.setdefault(s.id, {})[node.end] = snapshot
                    return node.end
                break
        self._context.clear(s)
        return 0
