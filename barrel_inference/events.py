"""Log events: one name per thing that can happen, plus fields with units. No prompt or reply text, ever.

Names are `subject.verb-in-the-past`; a lifecycle has matching ends. The list is in docs/reference/events.md.
"""

import logging
import sys
from typing import Any

import structlog


def configure(*, json: bool, level: str) -> None:
    """Send events to standard error, one line each, as JSON or for a person to read."""
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    processors.append(structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def logger(process_id: str, incarnation: int) -> Any:
    """A logger whose events say which process and incarnation they are from."""
    return structlog.get_logger().bind(process=process_id, incarnation=incarnation)
