"""One request's stream on the client's side: sends it, survives deaths, hands events to its reader."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

from barrel_inference import codec, protocol, resubmission
from barrel_inference.credit import Credit
from barrel_inference.errors import BarrelError, InternalError, ModelDown, NoRuntime
from barrel_inference.link import Deadline, Link, answer, new_id, within
from barrel_inference.protocol import Cancel, Complete, Completed, Progress, TokenEvent
from barrel_inference.resubmission import ConnectionLost, Delivered, Tally
from barrel_inference.results import Completion, StreamEvent, completion_of, event_of

# The model answers when a deadline passes; the client gives up on its own only when that answer does not come.
DEADLINE_GRACE_S = 2.0


class AsyncStream(AsyncIterator[StreamEvent]):
    """The events of one request, the last of them `done`. Leaving its `async with` block early cancels the request.

    It is under way from the moment it is made, whether it is read or not; a reader that pauses holds up this stream only.
    """

    def __init__(self, link: Link, model_id: str, request: Complete, deadline_s: float | None) -> None:
        self.request_id = new_id()
        self.on_progress: Callable[[Progress], None] | None = None
        self.on_arrival: Callable[[], object] = lambda: None  # called on the loop: something has arrived, or it is over
        self._link = link
        self._target = f"model:{model_id}"
        self._request = request
        self._deadline = Deadline(deadline_s)
        self._credit = Credit()
        self._tally = Tally()
        self._token_ids: list[int] = []
        self._text_bytes = 0
        self._span_ends = 0
        self._seed: int | None = None
        self._unread: deque[StreamEvent] = deque()
        self._progress: Progress | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()  # around `_unread` and `_credit`, which change together
        self._arrived = asyncio.Event()
        self._is_cancelled = False
        self._is_over = False  # nothing more will arrive
        self.was_cut_off = False  # its client was closed before its end
        self._loop = asyncio.get_running_loop()
        self._driver = self._loop.create_task(self._drive())

    # --- reading

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    def __await__(self) -> Generator[Any, None, "AsyncStream"]:
        """`await client.stream(...)` is the stream too."""
        yield from asyncio.sleep(0).__await__()
        return self

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> StreamEvent:
        while not self._unread:
            if self._progress is not None and self.on_progress is not None:
                progress, self._progress = self._progress, None
                self.on_progress(progress)
            if self._is_over:
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                if self.was_cut_off:
                    raise NoRuntime("the client is closed", hint="make a new client")
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        with self._lock:
            event = self._unread.popleft()
            granted = self._credit.took(1)
        if granted:
            self._grant(granted)
        return event

    def take(self) -> tuple[list[StreamEvent], Progress | None, bool]:
        """Everything that has arrived, and whether it was the last; raises what ended the stream after that.

        For a reader on another thread, which `on_arrival` tells when to look again.
        """
        is_last = self._is_over  # asked first: what came before the end is found below
        with self._lock:
            events = [self._unread.popleft() for _ in range(len(self._unread))]
            granted = self._credit.took(len(events))
        progress, self._progress = self._progress, None
        if granted and not is_last:
            self._loop.call_soon_threadsafe(self._grant, granted)
        if is_last and not events and self._error is not None:
            error, self._error = self._error, None
            raise error
        return events, progress, is_last

    async def result(self) -> Completion:
        """Read on to the end."""
        async for event in self:
            if event.result is not None:
                return event.result
        raise InternalError(f"request {self.request_id} ended without a result")

    async def cancel(self) -> None:
        """Ask for the end: the stream goes on to `done`, with finish_reason `cancelled`."""
        self._is_cancelled = True
        if not self._is_over:
            await self._link.cast("router", Cancel(request_id=self.request_id))

    async def close(self) -> None:
        """End it without waiting for `done`; a request that still runs is cancelled in the runtime."""
        self.abandon()
        await asyncio.wait([self._driver])

    async def cut_off(self) -> None:
        """`close` under its reader, who is told."""
        self.was_cut_off = not self._is_over
        await self.close()

    def abandon(self) -> None:
        """`close` for those who cannot wait."""
        self._is_over = True
        self._driver.cancel()

    def _grant(self, events: int) -> None:
        if not self._is_over:
            self._link.cast_now(self._target, protocol.Credit(request_id=self.request_id, events=events))

    # --- driving

    async def _drive(self) -> None:
        try:
            completed = await self._until_completed()
            result = completion_of(completed, request_id=self.request_id, resubmitted=self._tally.survived)
            self._unread.append(StreamEvent("done", result=result))
        except asyncio.CancelledError:
            pass  # nobody reads on; whoever had the request was told
        except Exception as error:  # whatever it is belongs to the reader
            self._error = error
        finally:
            self._is_over = True
            self._tell()

    async def _until_completed(self) -> Completed:
        request = self._request
        while True:
            try:
                return await self._attempt(request)
            except (BarrelError, ConnectionLost) as failure:
                seen = self._tally
                self._tally = resubmission.after(failure, self._tally, retry=self._link.retry)
                if isinstance(failure, ModelDown):
                    await self._link.wait_until_back(self._target, self._deadline)
                if self._tally != seen:
                    request = await self._resumed()

    async def _attempt(self, request: Complete) -> Completed:
        connection = await within(self._link.connection(), self._deadline, f"connecting to {self._link.endpoint}")
        deadline_ms = self._deadline.left_ms
        grace = Deadline(None if not deadline_ms else deadline_ms / 1000 + DEADLINE_GRACE_S)
        with self._lock:
            credit = self._credit.first_grant(len(self._unread))
        call = connection.start(
            self._target, request, request_id=self.request_id, deadline_ms=deadline_ms, credit=credit,
            on_event=self._on_event,
        )  # fmt: skip
        if self._is_cancelled:  # who was asked to end it is dead; its successor gives the caller its result
            connection.cast("router", Cancel(request_id=self.request_id))
        body = await answer(connection, call, grace, f"request {self.request_id}")
        return codec.decode(body, Completed)

    async def _resumed(self) -> Complete:
        """The request with what was delivered; a continuation's suffix is tokenised first, as its session would have."""
        delivered = Delivered(tuple(self._token_ids), self._text_bytes, self._seed, self._span_ends)
        suffix_ids: list[int] | None = None
        original = self._request
        if original.mode == "continue" and resubmission.is_restartable(original):
            if isinstance(original.prompt, list):
                suffix_ids = original.prompt
            else:
                question = protocol.Tokenize(
                    text=original.prompt, add_special=False, parse_special=original.parse_special
                )
                left_s = self._deadline.left_s
                suffix_ids = (await self._link.call(self._target, question, protocol.TokenIds, deadline_s=left_s)).ids
        return resubmission.resumed(original, delivered, self._tally, suffix_ids=suffix_ids)

    def _on_event(self, kind: str, body: bytes) -> None:
        if kind == "progress":
            self._progress = codec.decode(body, Progress)
        else:
            event = codec.decode(body, TokenEvent)
            self._token_ids += event.token_ids
            self._text_bytes += len(event.data)
            self._span_ends += kind.endswith("_end")
            self._seed = event.seed if event.seed is not None else self._seed
            self._unread.append(event_of(kind, event))
        self._tell()

    def _tell(self) -> None:
        self._arrived.set()
        self.on_arrival()
