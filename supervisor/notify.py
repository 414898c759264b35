"""What the supervisor says to whoever started it: to systemd by datagrams, to a launcher by one line on a descriptor."""

import contextlib
import os
import socket
from collections.abc import Mapping

import msgspec

from barrel_inference.protocol import ErrorBody

# The manager's queue holds a few datagrams; while it is full, a send waits. Beats of children are late by less than they may.
_PATIENCE_S = 1.0


class Started(msgspec.Struct, frozen=True):
    """The line on `--ready-fd`: everything is ready, or why it is not."""

    pid: int
    error: ErrorBody | None = None


def report_start(ready_fd: int | None, error: ErrorBody | None = None) -> None:
    """Write the line and close the descriptor. A launcher that is gone is no error."""
    if ready_fd is None:
        return
    with contextlib.suppress(OSError):
        os.write(ready_fd, msgspec.json.encode(Started(os.getpid(), error)) + b"\n")
    with contextlib.suppress(OSError):
        os.close(ready_fd)


class Systemd:
    """sd_notify(3); silent when the process was not started by systemd."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        own_pid = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        watchdog_us = int(environment.get("WATCHDOG_USEC", "0")) if own_pid else 0
        # Half of what is allowed, as sd_watchdog_enabled(3) recommends.
        self.watchdog_s = watchdog_us / 2e6 if self._address and watchdog_us else None

    def say(self, *states: str) -> None:
        """Send e.g. `READY=1`; a manager that does not listen is no error.

        One that is slow to read is waited for as long as nothing else suffers from it.
        """
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
            # A sign of life that finds the queue full can be left out: those in it are as good.
            datagram.settimeout(0.0 if "WATCHDOG=1" in states else _PATIENCE_S)
            datagram.sendto("\n".join(states).encode(), self._address)
