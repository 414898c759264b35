"""What a killed model was computing (workers/blackbox.py)."""

import os
import signal
from pathlib import Path

import pytest

from barrel_inference.workers.blackbox import RECORDS, Reading, Recorder, names, path_of


def test_notes_outlive_their_process(tmp_path: Path) -> None:
    """After SIGKILL of the writer and the removal of its file, the reader knows what was being computed and what was not."""
    path = path_of(tmp_path, "model:m")
    says, told = os.pipe()
    child = os.fork()
    if not child:
        recorder = Recorder(path)
        for name in ("ended", "waits", "runs"):
            recorder.computes(name)
        recorder.rests("ended")
        recorder.rests("waits")
        os.write(told, b"!")
        signal.pause()
    assert os.read(says, 1) == b"!"
    reading = Reading(path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    path.unlink()
    computing = reading.computing()
    assert [names(computing, name) for name in ("runs", "waits", "ended", "unknown")] == [True, False, False, False]
    reading.close()
    os.close(says)
    os.close(told)


def test_more_than_fit(tmp_path: Path) -> None:
    """What finds no room is left out; room that was given back is used again."""
    recorder = Recorder(path_of(tmp_path, "m"))
    for number in range(RECORDS + 10):
        recorder.computes(f"r{number}")
    reading = Reading(path_of(tmp_path, "m"))
    assert len(reading.computing()) == RECORDS
    assert not names(reading.computing(), f"r{RECORDS}")
    recorder.rests("r0")
    recorder.rests("r0")
    recorder.computes("late")
    assert names(reading.computing(), "late")
    assert len(reading.computing()) == RECORDS
    reading.close()


def test_no_box(tmp_path: Path) -> None:
    """Without a file nothing is noted and nothing fails; a file that is too short is no black box."""
    recorder = Recorder(tmp_path / "absent" / "m.box")
    recorder.computes("r")
    recorder.rests("r")
    with pytest.raises(FileNotFoundError):
        Reading(tmp_path / "absent" / "m.box")
    (tmp_path / "short.box").write_bytes(b"x")
    with pytest.raises(ValueError, match="size"):
        Reading(tmp_path / "short.box")
