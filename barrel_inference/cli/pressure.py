"""pressure status, enable, disable, check."""

from typing import Any

import typer

from barrel_inference.cli import context, output
from barrel_inference.cli.lifecycle import AsJson

app = typer.Typer(no_args_is_help=True, help="The poller that evicts when memory runs short.")


@app.command()
def status(as_json: AsJson = False) -> None:
    """Settings, the last reading, and what was evicted so far.

    Example: barrelctl pressure status
    """
    with context.connected(timeout_s=10.0) as client:
        _show(dict(client.pressure.status()), as_json)


@app.command()
def enable(as_json: AsJson = False) -> None:
    """Switch the poller on.

    Example: barrelctl pressure enable
    """
    with context.connected(timeout_s=10.0) as client:
        _show(dict(client.pressure.enable(True)), as_json)


@app.command()
def disable(as_json: AsJson = False) -> None:
    """Switch the poller off.

    Example: barrelctl pressure disable
    """
    with context.connected(timeout_s=10.0) as client:
        _show(dict(client.pressure.enable(False)), as_json)


@app.command()
def check(as_json: AsJson = False) -> None:
    """Read the source now, and evict if the reading is above the high watermark.

    Example: barrelctl pressure check
    """
    with context.connected() as client:
        _show(dict(client.pressure.check()), as_json)


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        output.document(found)
        return
    rows = [
        [name, output.size(value) if name.endswith("_bytes") and isinstance(value, int) else value]
        for name, value in found.items()
    ]
    output.table(["pressure", "value"], rows, empty="the poller has nothing to say")
