"""Log events: one name per thing that can happen, plus fields with units. No prompt or reply text, ever.

Names are `subject.verb-in-the-past`; a lifecycle has matching ends. The list is in docs/reference/events.md.
"""

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal

from barrel_inference.log_file import Lines

# structlog takes rich along if it is there, for tracebacks in colour, which nothing here prints: a third of a child's start.
_rich = sys.modules.setdefault("rich", None)  # type: ignore[arg-type]  # None: an import of it fails
import structlog  # noqa: E402

if _rich is None:
    del sys.modules["rich"]

_least = logging.INFO


def set_level(level: str) -> None:
    """Write events of this level and above from now on; loggers that exist already follow."""
    global _least
    _least = getattr(logging, level.upper())


def _drop_below(_logger: Any, method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    # A processor and not structlog's filtering class: that one is fixed when a logger is first used.
    if getattr(logging, method.upper(), logging.CRITICAL) < _least:
        raise structlog.DropEvent
    return fields


# How events look on standard error. `journal`: as journald wants them, which knows the time and the process itself.
Style = Literal["json", "console", "journal"]

# syslog(3)'s priorities, by which `journalctl -p warning` selects.
_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def style_for(wanted: str, descriptor: int, environment: Mapping[str, str]) -> Style:
    """How to write to a descriptor: `json`, `console`, or `auto`, which is JSON unless a person or the journal reads it."""
    found = os.fstat(descriptor)
    if wanted != "json" and environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}":  # systemd.exec(5)
        return "journal"
    return "console" if wanted == "console" or (wanted == "auto" and os.isatty(descriptor)) else "json"


def configure(*, level: str, style: Style = "json", keep: int | None = None) -> None:
    """Send events to standard error, one line each; and as JSON to the descriptor `keep`, unless that is the same file."""
    set_level(level)
    own = Lines(2)
    console = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR"))
    renderers: dict[Style, structlog.typing.Processor] = {"json": _to_json, "console": console, "journal": _for_journal}
    kept: list[Any] = []
    if keep is not None and os.path.samestat(os.fstat(keep), os.fstat(2)):
        style = "json"
    elif keep is not None:
        kept = [_Keep(Lines(keep))]
    structlog.configure(
        processors=[
            _drop_below,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *kept,
            renderers[style],
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=lambda *_names: _LineLogger(own),
        cache_logger_on_first_use=True,
    )


class _LineLogger:
    """What structlog calls at the end, under the name of the level."""

    def __init__(self, lines: Lines) -> None:
        self.msg = self.debug = self.info = self.warning = self.error = self.critical = lines.write


class _Keep:
    """Writes a copy of each event on its way."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def __call__(self, logger: Any, method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        self._lines.write(_to_json(logger, method, dict(fields)))
        return fields


def _to_json(logger: Any, method: str, fields: MutableMapping[str, Any]) -> str:
    return str(
        structlog.processors.JSONRenderer()(
            logger, method, structlog.processors.format_exc_info(logger, method, fields)
        )
    )


def _for_journal(logger: Any, method: str, fields: MutableMapping[str, Any]) -> str:
    fields = structlog.processors.format_exc_info(logger, method, fields)
    event = fields.pop("event")
    hidden = ("timestamp", "level", "process", "incarnation")
    values = [f"{key}={value!r}" if isinstance(value, str) else f"{key}={value}" for key, value in fields.items()
              if key not in hidden]  # fmt: skip
    return " ".join([f"<{_PRIORITIES.get(method, 6)}>{event}", *values])


def logger(process_id: str, incarnation: int) -> Any:
    """A logger whose events say which process and incarnation they are from."""
    return structlog.get_logger().bind(process=process_id, incarnation=incarnation)
