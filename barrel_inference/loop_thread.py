"""An event loop on a thread of its own, for callers that have none."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from barrel_inference.errors import NoRuntime

T = TypeVar("T")

# How long an interrupted call waits for its cancel to be sent.
CANCEL_WAIT_S = 1.0


class LoopThread:
    """Started when it is made; ended by `stop`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name="barrel-client", daemon=True)
        self._thread.start()

    def _live(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin it on the loop."""
        if self.loop.is_closed() or not self._thread.is_alive():
            coroutine.close()
            raise NoRuntime("the client is closed", hint="make a new Client")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the loop and wait; what interrupts the wait cancels the coroutine."""
        future = self.start(coroutine)
        with self.cancelling(future):
            return future.result()

    @contextlib.contextmanager
    def cancelling(self, future: "Future[Any]") -> Iterator[None]:
        """Whatever is raised inside (Ctrl-C above all) cancels `future`, if that is not over."""
        try:
            yield
        except BaseException:
            if not future.done():
                future.cancel()
                # The cancel is carried out before this: the loop's queue is first in, first out.
                with contextlib.suppress(Exception):
                    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), self.loop).result(CANCEL_WAIT_S)
            raise

    def call(self, function: Callable[[], object]) -> None:
        """Run a function on the loop, some time; nothing happens if it is over."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function)

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `last` and end the thread; a second time does nothing."""
        if not self._thread.is_alive():
            return

        async def end() -> None:
            await last()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(end(), self.loop).result(2 * CANCEL_WAIT_S)
        self.call(self.loop.stop)
        self._thread.join(CANCEL_WAIT_S)
