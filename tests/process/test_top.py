"""`barrelctl top` in a terminal: it shows a real runtime, and leaves the terminal as it was."""

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest

from barrel_inference import Runtime
from tests.process import caching

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    """A runtime with a model that has answered once."""
    with Runtime(caching.CONFIG) as made:
        with made.client() as client:
            model = caching.load(client, name="watched")
            client.complete(model, "1 2 3 4 5", response_tokens=2)
        yield made


def command(runtime: Runtime, *arguments: str) -> list[str]:
    """The command line of a look at this runtime."""
    return [sys.executable, "-m", "barrel_inference.cli.main", "--endpoint", runtime.endpoint, "top", *arguments]


def read_until(descriptor: int, text: bytes) -> bytes:
    """What comes from a terminal until a text does."""
    seen = b""
    end_s = time.monotonic() + DEADLINE_S
    while text not in seen:
        assert time.monotonic() < end_s, seen
        if select.select([descriptor], [], [], 0.1)[0]:
            seen += os.read(descriptor, 65536)
    return seen


def test_one_picture_without_a_terminal(runtime: Runtime) -> None:
    """Into a pipe goes one picture with every part of the runtime."""
    done = subprocess.run(command(runtime, "--once"), capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    for part in ("Barrel Inference", "poller off", "tier:ram_file", "writer:0", "pressure", "idle", "cold"):
        assert part in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    assert not done.stderr


@pytest.mark.parametrize("end", [b"q", signal.SIGINT])
def test_it_quits_clean(runtime: Runtime, end: bytes | signal.Signals) -> None:
    """`q` and SIGINT, which is Ctrl-C, end it with success; the terminal's modes are as before."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    before = termios.tcgetattr(theirs)
    watcher = subprocess.Popen(
        command(runtime), stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    try:
        read_until(ours, b"PROCESS")
        if isinstance(end, bytes):
            os.write(ours, end)
        else:
            watcher.send_signal(end)
        read_until(ours, b"\x1b[?1049l")  # back on the screen that was there before
        assert watcher.wait(DEADLINE_S) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        watcher.kill()
        watcher.wait()
        os.close(ours)
        os.close(theirs)
