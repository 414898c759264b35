"""llama.cpp's own log lines: errors are kept as reasons, the rest goes to the log at debug level.

llama.cpp has one callback per process and calls it from whatever thread it is in; ctypes takes the GIL for it. So the callback
here belongs to the module, is never freed, and hands each line to everyone who listens.
"""

import ctypes
import re
from collections import deque
from collections.abc import Callable, Iterable
from weakref import WeakSet

import llama_cpp.llama_cpp as L

_INFO, _WARN, _ERROR, _CONTINUED = 2, 3, 4, 5  # enum ggml_log_level
_KEPT_LINES = 40
_SIZE = re.compile(r"(?P<what>KV|RS|compute|output) buffer size\s*=\s*(?P<mib>[\d.]+) MiB")
_ROTATION = re.compile(r"attn_rot_(?P<plane>[kv])\s*=\s*(?P<value>\d+)")


class LogLines:
    """The last lines of llama.cpp, errors apart."""

    def __init__(self, sink: Callable[[str], None] | None = None) -> None:
        self.errors: deque[str] = deque(maxlen=_KEPT_LINES)
        self.lines: deque[str] = deque(maxlen=2000)
        self._sink = sink
        _listening.add(self)
        L.llama_log_set(_callback, ctypes.c_void_p(0))

    def take(self, level: int, line: str) -> None:
        """One line, as llama.cpp said it."""
        if level >= _ERROR:
            self.errors.append(line)
        self.lines.append(line)
        if self._sink:
            self._sink(line)

    def clear(self) -> None:
        """Forget all lines: what follows belongs to the next action."""
        self.errors.clear()
        self.lines.clear()

    def reason(self) -> str:
        """The errors since `clear`, joined; "no reason given" without any."""
        return "; ".join(dict.fromkeys(self.errors)) or "llama.cpp gave no reason"

    def has_error(self, text: str) -> bool:
        """Did one of the errors since `clear` contain this text?"""
        return any(text in line for line in self.errors)


_listening: WeakSet[LogLines] = WeakSet()


@L.llama_log_callback  # type: ignore[untyped-decorator]  # a ctypes function type
def _callback(level: int, text: bytes, _data: object) -> None:
    line = text.decode("utf-8", "replace").strip()
    if line and level >= _INFO and level != _CONTINUED:
        for lines in list(_listening):
            lines.take(level, line)


def buffer_bytes(lines: Iterable[str], *kinds: str) -> int:
    """The sizes of the buffers that a context said it has made, by kind: KV, RS, compute, output. Pure."""
    matches = (_SIZE.search(line) for line in lines)
    return sum(int(float(found["mib"]) * 1024 * 1024) for found in matches if found and found["what"] in kinds)


def rotations(lines: Iterable[str]) -> list[tuple[str, int]]:
    """Whether keys and values are rotated before they are quantised; no state says it, and a wrong one is read silently. Pure."""
    matches = (_ROTATION.search(line) for line in lines)
    return sorted({(found["plane"], int(found["value"])) for found in matches if found})
