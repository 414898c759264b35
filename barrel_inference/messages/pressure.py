"""What the memory-pressure poller answers. Pure."""

from typing import Any

from barrel_inference.messages.base import Message


class PressureCommand(Message, frozen=True):
    """Call to the poller: one of status, sample, check, enable, disable, set_source, set_thresholds."""

    command: str
    source: str | None = None
    high: float | None = None
    low: float | None = None


class PressureReply(Message, frozen=True):
    """Reply: the fields of `pressure.status()`, or the reading of `sample`."""

    status: dict[str, Any]
