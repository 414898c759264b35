"""Printing: results to standard output, everything else to standard error; colours on terminals only."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# Columns of a table are never cut when it goes into a file or a pipe.
_PIPE_WIDTH = 1000


@cache
def out() -> "Console":
    """For results. Honours NO_COLOR."""
    from rich.console import Console  # here, because most of barrelctl's start would be rich

    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


@cache
def err() -> "Console":
    """For progress, warnings and errors."""
    from rich.console import Console  # as above

    return Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """A line about what happens, on standard error."""
    print(text, file=sys.stderr, flush=True)


def is_coloured(stream: TextIO) -> bool:
    """Do colours make sense there?"""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def printable(text: str) -> str:
    """A line without what a terminal would take for an order."""
    return "".join(character if character.isprintable() or character == "\t" else "\ufffd" for character in text)


def can_ask() -> bool:
    """Is there a person at a terminal who would answer?"""
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something that cannot be undone, if a person is there to answer; `--yes` is the answer already.

    Raises:
        typer.Abort: the answer is no.
    """
    if not yes and can_ask():
        import typer  # here, so that printing needs no more than it does

        typer.confirm(question, abort=True, err=True)


def document(value: Any) -> None:
    """One JSON document; bytes are written as hexadecimal digits."""
    print(json.dumps(plain(value), indent=2 if sys.stdout.isatty() else None, ensure_ascii=False))


def plain(value: Any) -> Any:
    """The value as JSON knows it."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return None
    return value


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """A table; numbers are right-aligned. `empty` is said instead of one without rows, on standard error."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not rows:
        note(empty)
        return
    shown = Table(box=box.SIMPLE_HEAD if out().is_terminal else None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        is_number = all(isinstance(row[number], (int, float)) for row in rows)
        shown.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    out().print(shown)


def state(text: str) -> Any:
    """The name of a state in its colour."""
    from rich.text import Text

    colour = {
        "ready": "green", "idle": "green", "generating": "cyan", "prefilling": "cyan", "ok": "green",
        "loading": "yellow", "starting": "yellow", "backoff": "yellow", "restarting": "yellow", "warning": "yellow",
        "failed": "red", "stopping": "magenta",
    }.get(text, "")  # fmt: skip
    return Text(text, style=colour)


def size(count_bytes: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count_bytes) < 1024:
            return f"{count_bytes:.0f} {unit}" if unit == "B" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1024
    return f"{count_bytes:.1f} TiB"


def duration(seconds: float) -> str:
    """Seconds for people: 2h 03m."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole // 60 % 60:02d}m"
    return f"{whole // 86400}d {whole // 3600 % 24:02d}h"
