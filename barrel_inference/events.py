"""Log events: one name per thing that can happen, plus fields with units. No prompt or reply text, ever.

Names are `subject.verb-in-the-past`; a lifecycle has matching ends. The list is in docs/reference/events.md.
"""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

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


def configure(*, json: bool, level: str) -> None:
    """Send events to standard error, one line each, as JSON or for a person to read."""
    set_level(level)
    processors: list[Any] = [
        _drop_below,
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    processors.append(
        structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def logger(process_id: str, incarnation: int) -> Any:
    """A logger whose events say which process and incarnation they are from."""
    return structlog.get_logger().bind(process=process_id, incarnation=incarnation)
