"""From the engine thread to the loop: calls, as many as possible in one wake-up.

A wake-up takes time from the cores that compute, and the interpreter's lock from the engine thread. What nobody waits for goes
along with the next one. What streams have to say can wait for the instant at which one of them may send again; a timer on the
loop fetches it then, during a decode call.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any


class Outbox:
    """Calls put in on the engine thread are made on the loop, in the same order.

    Args:
        after: called after them; returns until which monotonic instant (s) nothing that `put_for_later` brings is needed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, after: Callable[[], float]) -> None:
        self._loop = loop
        self._after = after
        self._calls: deque[Callable[[], Any]] = deque()
        self._wake_sent = False
        self._resting_until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, call: Callable[[], Any]) -> None:
        """Make a call on the loop as soon as it turns."""
        self._calls.append(call)
        self._wake()

    def put_along(self, call: Callable[[], Any]) -> None:
        """Make a call on the loop with the next one that wakes it."""
        self._calls.append(call)

    def put_for_later(self, call: Callable[[], Any]) -> None:
        """Make a call on the loop, after a rest if one is under way."""
        self._calls.append(call)
        # After the append: a timer that fires in between has made the call, or has ended the rest.
        if time.monotonic() >= self._resting_until_s:
            self._wake()

    def _wake(self) -> None:
        if not self._wake_sent:
            self._wake_sent = True
            self._loop.call_soon_threadsafe(self.deliver)

    def deliver(self) -> None:
        """On the loop: make the calls that wait."""
        self._wake_sent = False
        while self._calls:
            self._calls.popleft()()
        if self._timer is not None:
            self._timer.cancel()
        began_s = (
            time.monotonic()
        )  # before: an engine thread that has seen the rest relies on the timer, however late it is
        self._resting_until_s = until_s = self._after()
        self._timer = self._loop.call_at(until_s, self.deliver) if until_s > began_s else None
