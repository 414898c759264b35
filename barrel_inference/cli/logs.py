"""logs: what the processes wrote, merged by time."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from barrel_inference.cli import completion, context, output
from barrel_inference.cli.failure import not_found
from barrel_inference.errors import NoRuntime

# How often a followed log is looked at: often enough for a person, too rarely to be noticed.
_FOLLOW_S = 0.2

# Of a log file, how much of its end is read at most.
_TAIL_BYTES = 4 * 1024 * 1024

_COLOURS = {"warning": "33", "error": "31", "critical": "31"}


def logs(
    process: Annotated[
        str | None, typer.Argument(help="Id of a process; default: all of them.", autocompletion=completion.process_ids)
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as more is written; Ctrl-C ends it.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", help="Lines to begin with.", min=0)] = 50,
    config: Annotated[Path | None, typer.Option(help="Configuration of a runtime that is not running.")] = None,
) -> None:
    """Print the logs, those of dead processes included.

    Example: barrelctl logs -f model:tiny
    """
    directory = log_dir(config)
    if process is not None and not (directory / f"{process}.log").is_file():
        known = sorted(path.stem for path in directory.glob("*.log"))
        raise not_found("log of a process", process, known, f"there are {', '.join(known) or 'none'} in {directory}")
    tails = {path: Tail(path) for path in _files(directory, process)}
    found = sorted((line for tail in tails.values() for line in tail.read()), key=lambda line: line.at)
    for line in found[-lines:] if lines else []:
        print(shown(line, colour=output.is_coloured(sys.stdout)))
    while follow:
        sys.stdout.flush()
        time.sleep(_FOLLOW_S)
        for path in _files(directory, process):
            for line in tails.setdefault(path, Tail(path)).read():
                print(shown(line, colour=output.is_coloured(sys.stdout)))


def log_dir(config: Path | None) -> Path:
    """Where the logs lie: of the running runtime, or of the one that this configuration would start."""
    if config is None:
        try:
            with context.connected(timeout_s=5.0) as client:
                return Path(client.status()["log_dir"])
        except NoRuntime:
            if context.endpoint is not None:
                raise
            output.note("(no runtime is running; these are the logs of the last one)")
    from barrel_inference import config as configuration  # here, so that other commands do not wait for them
    from barrel_inference import runtime

    settings = configuration.resolve(runtime.read_settings(config))
    return Path(settings.runtime.log_dir)


def _files(directory: Path, process: str | None) -> Iterator[Path]:
    return iter([directory / f"{process}.log"]) if process is not None else iter(sorted(directory.glob("*.log")))


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log."""

    at: str  # its time as ISO 8601 in UTC, which sorts as it reads
    process: str
    text: str
    fields: dict[str, Any] | None  # of an event; None: something else wrote it, llama.cpp for example


@dataclass(slots=True)
class Tail:
    """A file's end, read bit by bit as it grows."""

    path: Path
    _position: int | None = None
    _last_at: str = field(default="", init=False)

    def read(self) -> list[Line]:
        """The complete lines that were not read before."""
        try:
            with self.path.open("rb") as file:
                end = file.seek(0, 2)
                if self._position is None:
                    self._position = max(0, end - _TAIL_BYTES)
                elif end < self._position:  # set aside and begun anew
                    self._position = 0
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        whole, _, _ = data.rpartition(b"\n")
        self._position += len(whole) + 1 if whole else 0
        return [self._line(raw.decode(errors="replace")) for raw in whole.splitlines()]

    def _line(self, text: str) -> Line:
        line = parse(text, self.path.stem, self._last_at)
        self._last_at = line.at
        return line


def parse(text: str, process: str, last_at: str) -> Line:
    """A line of a log file. What is no event goes with the event before it. Pure."""
    try:
        fields = json.loads(text)
    except ValueError:
        return Line(last_at, process, text, None)
    if not isinstance(fields, dict) or "event" not in fields:
        return Line(last_at, process, text, None)
    return Line(str(fields.get("timestamp", last_at)), str(fields.get("process", process)), text, fields)


def shown(line: Line, *, colour: bool) -> str:
    """A line as it is printed: an event's fields as key=value, its traceback below. Pure."""
    if line.fields is None:
        return f"{' ' * 13}{line.process:<14} {output.printable(line.text)}"  # llama.cpp prints what model files say
    fields = dict(line.fields)
    at = str(fields.pop("timestamp", ""))[11:23]
    level, event = str(fields.pop("level", "info")), str(fields.pop("event"))
    fields.pop("process", None)
    fields.pop("incarnation", None)
    traceback = str(fields.pop("traceback", "")).rstrip()
    values = " ".join(
        f"{key}={value!r}" if isinstance(value, str) else f"{key}={value}" for key, value in fields.items()
    )
    name = f"\033[{_COLOURS[level]}m{event}\033[0m" if colour and level in _COLOURS else event
    mark = "" if colour or level not in _COLOURS else f" [{level}]"
    text = f"{at} {line.process:<14} {name}{mark} {values}".rstrip()
    return f"{text}\n{traceback}" if traceback else text
