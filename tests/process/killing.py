"""Kill, stop and fill things under a running runtime, and check what its callers saw."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from barrel_inference import Client, Runtime
from barrel_inference.results import Completion, StreamEvent

T = TypeVar("T")
DEADLINE_S = 60.0

# Every stub model that a test loads: small saves from the fourth token on.
POLICY = {
    "min_tokens": 4, "cold_min_tokens": 4, "cold_max_tokens": 100_000, "boundary_trim_tokens": 0,
    "boundary_align_tokens": 1, "continued_interval": 16,
}  # fmt: skip


def wait_for(look: Callable[[], T | None], what: str = "it came to hold", deadline_s: float = DEADLINE_S) -> T:
    """What `look` finds, as soon as it finds anything."""
    end_s = time.monotonic() + deadline_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < end_s, f"not within {deadline_s:g} s: {what}"
        select.select([], [], [], 0.01)


def end_of(pid: int, deadline_s: float = DEADLINE_S) -> bool:
    """Wait for the end of a process; whether it came."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(descriptor):
        poll = select.poll()
        poll.register(descriptor)
        return bool(poll.poll(int(deadline_s * 1000)))


def kill(runtime: Runtime, process_id: str) -> int:
    """SIGKILL a process of the runtime; the value is the pid that it had."""
    pid = runtime.processes()[process_id]
    os.kill(pid, signal.SIGKILL)
    return pid


def came_back(runtime: Runtime, process_id: str, old_pid: int) -> int:
    """The pid of the process that took the dead one's place."""
    return wait_for(
        lambda: ((pid := runtime.processes().get(process_id)) is not None and pid != old_pid and pid) or None,
        f"{process_id} is back",
    )


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process under SIGSTOP."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@dataclass
class Seen:
    """What the reader of a stream got."""

    ids: list[int] = field(default_factory=list)
    text: bytes = b""
    kinds: list[str] = field(default_factory=list)  # of neighbours that are equal, one
    result: Completion | None = None

    def add(self, event: StreamEvent) -> None:
        """Take one event."""
        self.ids += event.token_ids
        if event.kind in ("token", "thinking", "tool_call"):
            self.text += event.data
        if not self.kinds or self.kinds[-1] != event.kind:
            self.kinds.append(event.kind)
        if event.result is not None:
            assert self.result is None, "the end came twice"
            self.result = event.result

    @property
    def end(self) -> Completion:
        """The result."""
        assert self.result is not None
        return self.result


def read(events: Iterable[StreamEvent], disturb: Callable[[], object] | None = None, *, after: int = 5) -> Seen:
    """Read a stream to its end; `disturb` is called when `after` tokens have arrived."""
    seen = Seen()
    for event in events:
        seen.add(event)
        if disturb is not None and len(seen.ids) >= after:
            disturb()
            disturb = None
    assert disturb is None, "the stream was over before anything happened"
    assert seen.ids == seen.end.generated, "an id is missing, or came twice"
    return seen


def same(one: Seen, other: Seen) -> bool:
    """Did two readers see the same reply, whole?"""
    return (one.ids, one.text, one.kinds, one.end.reply_bytes, one.end.finish_reason, one.end.stop_sequence) == (
        other.ids, other.text, other.kinds, other.end.reply_bytes, other.end.finish_reason, other.end.stop_sequence
    )  # fmt: skip


def descriptors(pid: int) -> int:
    """How many descriptors a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def index_equals_storage(client: Client, disk_root: Path) -> bool:
    """Does the index have a row for every file of the disk tier, and a file for every row?"""
    rows = {row.location for row in client.cache.dump() if row.tier == "disk" and row.status == "available"}
    files = {str(path.relative_to(disk_root)) for path in disk_root.rglob("*") if path.is_file()}
    return {location.rpartition(":")[2] for location in rows} == files
