"""barrelctl's own decisions: exit codes, lines, log formatting (barrel_inference/cli)."""

import os

import pytest

from barrel_inference.cli import failure, logs, output
from barrel_inference.errors import BarrelError, InvalidArgument, ModelDown, NoRuntime, NotFound


@pytest.mark.parametrize(
    ("error", "code"),
    [(ModelDown("x"), 1), (InvalidArgument("x"), 2), (NoRuntime("x"), 3), (NotFound("x"), 4)],
)
def test_exit_codes(error: BarrelError, code: int) -> None:
    """1 the request failed, 2 wrong usage, 3 no runtime, 4 not found."""
    assert failure.exit_code(error) == code


def test_an_error_is_one_line() -> None:
    """A message with line feeds becomes one line; only a configuration's problems have a line each."""
    assert failure.one_line(ModelDown("it\n  died", hint="try again")) == "it died — try again"
    problems = InvalidArgument("2 problems:\n  a\n  b", problems=["a", "b"])
    assert failure.one_line(problems) == "2 problems:\n  a\n  b"


def test_suggestions() -> None:
    """A misspelt name gets the close one, anything else the general hint."""
    assert failure.not_found("process", "indx", ["index", "router"], "look").hint == "did you mean 'index'?"
    assert failure.not_found("process", "xyz", ["index", "router"], "look").hint == "look"


@pytest.mark.parametrize(
    ("count_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (1 << 50, "1024.0 TiB")],
)
def test_sizes(count_bytes: int, text: str) -> None:
    """Sizes are told in the unit that fits."""
    assert output.size(count_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59, "59s"), (61, "1m 01s"), (3600, "1h 00m"), (90000, "1d 01h")]
)
def test_durations(seconds: float, text: str) -> None:
    """Durations are told in the two units that fit."""
    assert output.duration(seconds) == text


def test_json_of_everything() -> None:
    """Bytes become digits and infinity null, at any depth."""
    assert output.plain({"key": b"\x01", "rows": [(1, float("inf"))]}) == {"key": "01", "rows": [[1, None]]}


def test_log_lines() -> None:
    """An event is told by time, process, name and fields; what llama.cpp wrote goes with the event before it."""
    event = '{"process": "index", "incarnation": 3, "event": "child.crashed", "level": "error", "why": "a b", "n": 1, '
    line = logs.parse(event + '"timestamp": "2026-01-02T03:04:05.678901Z"}', "index", "")
    assert logs.shown(line, colour=False) == "03:04:05.678 index          child.crashed [error] why='a b' n=1"
    other = logs.parse("llama_new_context: n_ctx = 8 \033[2J", "model:tiny", line.at)
    assert (other.at, other.fields) == (line.at, None)
    assert logs.shown(other, colour=False).endswith("model:tiny     llama_new_context: n_ctx = 8 \ufffd[2J")


@pytest.mark.parametrize(("no_color", "coloured"), [(None, True), ("", True), ("1", False)])
def test_no_color(monkeypatch: pytest.MonkeyPatch, no_color: str | None, coloured: bool) -> None:
    """A terminal gets colours unless NO_COLOR is set to something; a file gets none."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "w") as terminal, open(os.devnull, "w") as file:
        assert (output.is_coloured(terminal), output.is_coloured(file)) == (coloured, False)
