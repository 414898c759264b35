"""What the shell's completion offers besides commands and options: ids that the running runtime knows."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from barrel_inference.cli import context
from barrel_inference.errors import BarrelError

if TYPE_CHECKING:
    from barrel_inference.client import Client

# Somebody waits with a finger on the key.
_TIMEOUT_S = 2.0


def model_ids(incomplete: str) -> list[str]:
    """Ids of models; none without a runtime."""
    return _asked(incomplete, lambda client: (row.model_id for row in client.models()))


def process_ids(incomplete: str) -> list[str]:
    """Ids of processes; none without a runtime."""
    return _asked(incomplete, lambda client: client.processes())


def _asked(incomplete: str, ask: "Callable[[Client], Iterable[str]]") -> list[str]:
    try:
        with context.connected(timeout_s=_TIMEOUT_S) as client:
            return [name for name in ask(client) if name.startswith(incomplete)]
    except BarrelError:
        return []
