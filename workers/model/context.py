"""The engine's sequences together with what is known of them: the table, snapshots, and moves that keep both in step.

Every method runs on the engine thread.
"""

from collections.abc import Callable

from barrel_inference.workers.model.engine import Engine, NoCells
from barrel_inference.workers.model.sequences import Sequence_, SequenceTable, Use

# Snapshots kept per sequence (recurrent models): a static head's end, the save boundary, one before the prompt's end, that
# end, the end.
KEPT_SNAPSHOTS = 5


class Context:
    """One engine's context."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.table = SequenceTable.of(engine.info.n_seq_max)
        self.snapshots: dict[int, dict[int, bytes]] = {}  # by sequence, by position

    def clear(self, s: Sequence_) -> None:
        """Drop everything a sequence holds; an idle one is free then, its session over."""
        self.engine.clear(s.id)
        self.snapshots.pop(s.id, None)
        s.tokens, s.saved_tokens = [], 0
        s.forget_logits()
        if s.use is not Use.BUSY:
            s.use, s.session = Use.FREE, None

    def cut(self, s: Sequence_, length: int) -> bool:
        """Keep the first `length` tokens; False: that was refused, or 0, and the sequence is empty now."""
        if length and self.engine.cut(s.id, length):
            s.tokens = s.tokens[:length]
            s.saved_tokens = min(s.saved_tokens, length)
            if s.logits_at > length:
                s.forget_logits()
            self.snapshots[s.id] = {at: data for at, data in self.snapshots.get(s.id, {}).items() if at <= length}
            return True
        self.clear(s)
        return False

    def share(self, source: Sequence_, target: Sequence_, length: int) -> bool:
        """Let `target` hold the first `length` tokens of `source` instead of its own; False: it is empty now."""
        self.clear(target)
        if not self.engine.share(source.id, target.id, length):
            self.clear(target)
            return False
        target.tokens = source.tokens[:length]
        target.saved_tokens = min(source.saved_tokens, length)
        if source.logits_at <= length:
            target.logits, target.logits_at = source.logits, source.logits_at
        return True

    def with_room(self, action: Callable[[], bool]) -> bool:
        """Do something that takes cells, idle sequences giving way one by one.

        Raises:
            NoCells: none is idle any more.
        """
        while True:
            try:
                return action()
            except NoCells:
                if not self.free_one_idle():
                    raise

    def free_one_idle(self) -> bool:
        """Give up the warm sequence that was not used for longest; False: there is none."""
        idle = [s for s in self.table.sequences if s.use is Use.WARM and not s.holds]
        if not idle:
            return False
        self.clear(min(idle, key=lambda s: s.used))
        return True

    def take_snapshot(self, s: Sequence_) -> None:
        """Remember the state at a sequence's end, for models that resume only where one was taken."""
        info = self.engine.info
        if not info.needs_snapshot or not info.cacheable:
            return
        size = self.engine.snapshot_bytes(s.id)
        buffer = bytearray(size)
        if size and self.engine.export_snapshot(s.id, memoryview(buffer)):
            kept = self.snapshots.setdefault(s.id, {})
            kept[len(s.tokens)] = bytes(buffer)
            for at in sorted(kept)[:-KEPT_SNAPSHOTS]:
                del kept[at]
