"""Child processes: start, signal, notice the end, reap.

A child is started by exec, never by a fork that goes on running our code: this process has ZeroMQ threads. It leads a session
of its own, so a signal from a terminal reaches the supervisor only, and what the child started dies with it. Its standard
input gives it the boot document and then ties it to us: only we hold the write end.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from barrel_inference.errors import InvalidArgument
from barrel_inference.log_file import open_log
from barrel_inference.protocol import ChildSpec

_PIPE_BYTES = 64 * 1024
# The kernel's limit for users, /proc/sys/fs/pipe-max-size. A boot document above it would block the supervisor.
MAX_BOOT_BYTES = 1024 * 1024

_TAIL_BYTES = 8192

# Each child costs us three descriptors and each client costs the router one. What the service's unit asks for is the most.
LEAST_DESCRIPTORS = 128
MOST_DESCRIPTORS = 65536


def use_descriptors() -> None:
    """Take as many descriptors as we may, for us and our children: a shell's soft limit is few for a server with clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft != resource.RLIM_INFINITY and soft < LEAST_DESCRIPTORS:
        raise InvalidArgument(
            f"a process may open {soft} files here, a runtime needs {LEAST_DESCRIPTORS}", hint="raise `ulimit -n`"
        )


class Process:
    """A running child. `on_exit(status, reason)` is called once, on the loop, when it is gone and reaped."""

    def __init__(
        self, spec: ChildSpec, boot: bytes, log_path: Path, environment: Mapping[str, str],
        on_exit: Callable[[int, str], None], *, keep_fd: int | None = None,
    ) -> None:  # fmt: skip
        """Start it, or raise `OSError` or `InvalidArgument`. It inherits `keep_fd`."""
        if len(boot) > MAX_BOOT_BYTES:
            raise InvalidArgument(f"boot document of {spec.id} has {len(boot)} bytes, limit {MAX_BOOT_BYTES}")
        self._on_exit = on_exit
        self._is_reaped = False
        self._log_path = log_path
        with _log_or_nothing(log_path) as log:
            self._log_start = log.seek(0, os.SEEK_END)
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", spec.module, spec.id],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, bufsize=0,
                env={**environment, **spec.environment}, pass_fds=() if keep_fd is None else (keep_fd,),
            )  # fmt: skip
        self.pid = self._popen.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._reap)
        if spec.niceness:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.setpriority(os.PRIO_PROCESS, self.pid, spec.niceness)
        self._give(boot)

    def terminate(self) -> None:
        """Ask it to stop."""
        if self._is_reaped:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """End it and everything in its session's group."""
        if self._is_reaped:
            return  # its number may be somebody else's by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _give(self, boot: bytes) -> None:
        assert self._popen.stdin is not None
        if len(boot) > _PIPE_BYTES:
            fcntl.fcntl(self._popen.stdin, fcntl.F_SETPIPE_SZ, MAX_BOOT_BYTES)
        with contextlib.suppress(BrokenPipeError):  # it died already; its exit is on the way
            self._popen.stdin.write(boot)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        # Before the wait: until then the dead leader keeps its group's number from being given to others.
        self.kill()
        status = self._popen.wait()
        self._is_reaped = True
        os.close(self._pidfd)
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        said = last_words(_tail(self._log_path, self._log_start)) if status else ""
        self._on_exit(status, describe_exit(status) + (f": {said}" if said else ""))


def _log_or_nothing(path: Path) -> BinaryIO:
    """Its log; on a disk that takes no new file a process goes without."""
    try:
        return os.fdopen(open_log(path), "ab")
    except OSError:
        return open(os.devnull, "ab")


def describe_exit(status: int) -> str:
    """An exit for people: `exit status 70`, `signal SIGKILL`. Pure."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def last_words(log: str) -> str:
    """What the end of a log says about a death, in one line: a traceback's last line, or an assertion's. Pure."""
    for line in reversed(log.splitlines()):
        if line.startswith("{"):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event.get("event") == "child.crashed":
                return str(event.get("traceback", "")).strip().rpartition("\n")[2][:300]
            return str(event.get("reason", ""))[:300] if event.get("event") == "child.cannot_start" else ""
        if line.strip():
            return line.strip()[:300]
    return ""


def _tail(path: Path, start: int) -> str:
    """The end of what this process wrote, `start` being where it began."""
    try:
        with open(path, "rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(start if start <= end else 0, end - _TAIL_BYTES))  # begun anew, if it is shorter now
            return log.read().decode(errors="replace")
    except OSError:  # somebody removed it; the exit status has to do
        return ""
