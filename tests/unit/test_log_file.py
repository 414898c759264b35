"""Logs: where events go, how they look there, and that neither a full disk nor a long life is a problem."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from barrel_inference import events
from barrel_inference.log_file import Lines, open_log

SPEAK = """
import sys
from barrel_inference import events
from barrel_inference.log_file import open_log
from pathlib import Path
events.configure(level="info", style=sys.argv[1], keep=open_log(Path(sys.argv[2])) if sys.argv[2] else None)
log = events.logger("router", 7)
log.debug("not.shown")
log.error("save.lost", key="a b", tokens=5)
try:
    1 / 0
except ZeroDivisionError as bug:
    log.critical("child.crashed", exc_info=bug)
"""


def spoken(style: str, keep: str = "") -> list[str]:
    """Standard error of a process that has two things to say."""
    return subprocess.run(
        [sys.executable, "-P", "-c", SPEAK, style, keep], capture_output=True, text=True, check=True
    ).stderr.splitlines()  # fmt: skip


def test_events_for_programs(tmp_path: Path) -> None:
    """JSON has every field, and a copy of it is kept whatever standard error shows."""
    kept = tmp_path / "log" / "supervisor.log"
    assert spoken("console", str(kept))
    for lines in (spoken("json"), kept.read_text().splitlines()):
        found = [json.loads(line) for line in lines]
        assert [event["event"] for event in found] == ["save.lost", "child.crashed"]
        assert (found[0]["process"], found[0]["incarnation"], found[0]["tokens"]) == ("router", 7, 5)
        assert "ZeroDivisionError" in found[1]["exception"]
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_events_for_the_journal() -> None:
    """The journal gets a priority that it can select by, and neither the time nor the process, which it knows."""
    first, second, *_ = spoken("journal")
    assert first == "<3>save.lost key='a b' tokens=5"
    assert second.startswith("<2>child.crashed exception=")


@pytest.mark.parametrize(
    ("wanted", "is_journal", "style"),
    [
        ("auto", True, "journal"), ("console", True, "journal"), ("json", True, "json"), ("auto", False, "json"),
        ("console", False, "console"),
    ],
)  # fmt: skip
def test_style(tmp_path: Path, wanted: str, is_journal: bool, style: str) -> None:
    """JSON is for files and pipes; the journal is known by what systemd says of it."""
    descriptor = open_log(tmp_path / "x.log")
    found = os.fstat(descriptor)
    environment = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino if is_journal else 1}"}
    assert events.style_for(wanted, descriptor, environment) == style
    os.close(descriptor)


def test_a_long_log_is_set_aside(tmp_path: Path) -> None:
    """A log that has grown too long begins anew under its name, no line is lost, and one old log is kept."""
    path = tmp_path / "model:a.b.log"
    descriptor = open_log(path)
    lines = Lines(descriptor, limit_bytes=100)
    for number in range(9):
        lines.write(f"{number}" * 30)
    old = path.with_suffix(".log.old").read_text().split()
    assert [line[0] for line in old] == ["4", "5", "6", "7"]
    assert path.read_text().split() == ["8" * 30]
    os.close(descriptor)


def test_a_link_in_a_logs_place_is_not_followed(tmp_path: Path) -> None:
    """It is replaced, and what it pointed to stays as it was."""
    other = tmp_path / "other"
    other.write_text("mine")
    path = tmp_path / "router.log"
    path.symlink_to(other)
    os.close(open_log(path))
    assert (path.is_symlink(), other.read_text()) == (False, "mine")


def test_a_full_disk_costs_lines_only() -> None:
    """Whoever writes to a log that takes nothing goes on."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    Lines(descriptor).write("lost")
    os.close(descriptor)
