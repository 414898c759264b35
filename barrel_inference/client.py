"""Client: `AsyncClient` on a thread of its own, for programs without an event loop.

Every method hands its coroutine to that thread and waits. An interrupt (Ctrl-C) while it waits cancels the coroutine, and
with it the request in the runtime.
"""

import contextlib
import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Unpack

from barrel_inference.aio import Adapters, AsyncClient, LoadOptions
from barrel_inference.errors import InternalError, NoRuntime
from barrel_inference.loop_thread import LoopThread
from barrel_inference.namespaces import Cache, Pressure
from barrel_inference.protocol import LoadModel, Progress
from barrel_inference.request import CompleteOptions, ContinueOptions, Messages, Prompt
from barrel_inference.results import Completion, Fields, ModelInfo, StreamEvent
from barrel_inference.stream import AsyncStream

OnProgress = Callable[[float], object]


class Stream(Iterator[StreamEvent]):
    """The events of one request, the last of them `done`. A context manager: leaving early cancels the request."""

    def __init__(self, thread: LoopThread, stream: AsyncStream) -> None:
        self._thread = thread
        self._stream = stream
        self._ready: deque[StreamEvent] = deque()
        # Not a coroutine for each event: that wakes two threads where this wakes one.
        self._arrivals: SimpleQueue[None] = SimpleQueue()
        stream.on_arrival = functools.partial(self._arrivals.put, None)
        # A stream that is dropped half-read must not hold its sequence in the model for ever.
        self._finalizer = weakref.finalize(self, thread.call, stream.abandon)
        self._finalizer.atexit = False

    @property
    def request_id(self) -> str:
        """The id by which the request can be cancelled from anywhere."""
        return self._stream.request_id

    @property
    def on_progress(self) -> Callable[[Progress], None] | None:
        """Called by the reader's thread, while it waits for events, with how far the prompt is."""
        return self._stream.on_progress

    @on_progress.setter
    def on_progress(self, function: Callable[[Progress], None] | None) -> None:
        self._stream.on_progress = function

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> StreamEvent:
        while not self._ready:
            try:
                events, progress, is_last = self._stream.take()
            except BaseException:
                self._arrivals.put(None)
                raise
            self._ready.extend(events)
            if progress is not None and self._stream.on_progress is not None:
                self._stream.on_progress(progress)
            if not events:
                if is_last:
                    self._arrivals.put(None)  # whoever else reads it has to see the end too
                    if self._stream.was_cut_off:
                        raise NoRuntime("the client is closed", hint="make a new Client")
                    raise StopIteration
                self._wait()
        return self._ready.popleft()

    def _wait(self) -> None:
        try:
            self._arrivals.get()
        except KeyboardInterrupt:
            self.close()
            raise

    def result(self) -> Completion:
        """Read on to the end."""
        for event in self:
            if event.result is not None:
                return event.result
        raise InternalError(f"request {self.request_id} ended without a result")

    def cancel(self) -> None:
        """Ask for the end: the stream goes on to `done`, with finish_reason `cancelled`."""
        self._thread.run(self._stream.cancel())

    def close(self) -> None:
        """End it without waiting for `done`; a request that still runs is cancelled in the runtime."""
        self._finalizer.detach()
        with contextlib.suppress(NoRuntime):  # the client was closed before: that ended it
            self._thread.run(self._stream.close())


class Client:
    """Everything a runtime can be asked. Thread-safe; connects when it is first used.

    Args:
        endpoint: the router's; default `$BARREL_ENDPOINT`, else this user's runtime.
        timeout_s: how long a call may take that is given no deadline of its own; None = without end.
        retry: True: a call whose process dies is made again and its caller sees a pause; False: an error.
    """

    def __init__(self, endpoint: str | None = None, *, timeout_s: float | None = None, retry: bool = True) -> None:
        self._aio = AsyncClient(endpoint, timeout_s=timeout_s, retry=retry)
        self._thread = LoopThread()
        self._finalizer = weakref.finalize(self, self._thread.stop, self._aio.close)
        self.cache = Cache(self._thread, self._aio.cache)
        self.pressure = Pressure(self._thread, self._aio.pressure)

    @property
    def endpoint(self) -> str:
        """Where the runtime is expected."""
        return self._aio.endpoint

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; requests under way are cancelled."""
        self._finalizer()

    # --- models

    def load_model(
        self, model_path: str | os.PathLike[str], model_id: str | None = None, *,
        on_progress: Callable[[float], object] | None = None, force: bool = False, **options: Unpack[LoadOptions],
    ) -> str:  # fmt: skip
        """Load a model; returns its id when it is ready.

        Args:
            model_path: of a GGUF file; also a name from `[models]`, or `pkg:DISTRIBUTION`.
            model_id: default: the name from `[models]`, else one is made up.
            on_progress: gets fractions from 0 to 1.
            force: try although the estimate says that it does not fit in memory.
        """
        return self._telling(
            on_progress,
            lambda tell: self._aio.load_model(model_path, model_id, on_progress=tell, force=force, **options),
        )

    def estimate(self, model_path: str | os.PathLike[str], **options: Unpack[LoadOptions]) -> dict[str, int]:
        """Bytes that a load would take (`weights`, `kv`, `compute`), those it `needed` to find, and those `available`."""
        return self._thread.run(self._aio.estimate(model_path, **options))

    def estimate_as_given(self, message: LoadModel) -> dict[str, int]:
        """An estimate for options that are not looked at here."""
        return self._thread.run(self._aio.estimate_as_given(message))

    def load_as_given(self, message: LoadModel, *, on_progress: Callable[[float], object] | None = None) -> str:
        """Load with options that are not looked at here: the router knows the names of `[models]`."""
        return self._telling(on_progress, lambda tell: self._aio.load_as_given(message, on_progress=tell))

    def _telling(
        self, on_progress: Callable[[float], object] | None, load: Callable[[OnProgress | None], Coroutine[Any, Any, str]]
    ) -> str:  # fmt: skip
        """Run a load; its progress is told by the thread that waits for it, which may use this client to say so."""
        if on_progress is None:
            return self._thread.run(load(None))
        news: SimpleQueue[float | None] = SimpleQueue()
        future = self._thread.start(load(news.put))
        future.add_done_callback(lambda _future: news.put(None))
        with self._thread.cancelling(future):
            while (fraction := news.get()) is not None:
                on_progress(fraction)
            return future.result()

    def unload(self, model_id: str) -> None:
        """Unload; returns when the shutdown save is done and the process is gone."""
        self._thread.run(self._aio.unload(model_id))

    def set_adapters(self, model_id: str, adapters: Adapters) -> list[tuple[str, float]]:
        """Replace the adapters once no request runs; ends the model's sessions."""
        return self._thread.run(self._aio.set_adapters(model_id, adapters))

    def adapters(self, model_id: str) -> list[tuple[str, float]]:
        """The adapters in use."""
        return self._thread.run(self._aio.adapters(model_id))

    # --- requests

    def _start(self, make: Callable[[], AsyncStream]) -> Stream:
        async def start() -> AsyncStream:
            return make()

        return Stream(self._thread, self._thread.run(start()))

    def stream(self, model_id: str, prompt: Prompt, **options: Unpack[CompleteOptions]) -> Stream:
        """Generate; the stream is under way at once."""
        return self._start(lambda: self._aio.stream(model_id, prompt, **options))

    def complete(self, model_id: str, prompt: Prompt, **options: Unpack[CompleteOptions]) -> Completion:
        """Generate; the whole reply."""
        return self._thread.run(self._aio.complete(model_id, prompt, **options))

    def stream_continue(
        self, model_id: str, suffix: Prompt, *, session_id: str, expect_committed: Sequence[int] | None = None,
        **options: Unpack[ContinueOptions],
    ) -> Stream:  # fmt: skip
        """Append to a session and generate."""
        return self._start(
            lambda: self._aio.stream_continue(
                model_id, suffix, session_id=session_id, expect_committed=expect_committed, **options
            )
        )

    def continue_(
        self, model_id: str, suffix: Prompt, *, session_id: str, expect_committed: Sequence[int] | None = None,
        **options: Unpack[ContinueOptions],
    ) -> Completion:  # fmt: skip
        """Append to a session and generate; the whole reply."""
        return self._thread.run(
            self._aio.continue_(model_id, suffix, session_id=session_id, expect_committed=expect_committed, **options)
        )

    def prefill_only(
        self, model_id: str, prompt: Prompt, *, parent_key: bytes | None = None, session_id: str | None = None,
        prefix_checkpoint_len: int | None = None, deadline_s: float | None = None,
    ) -> Completion:  # fmt: skip
        """Compute a prompt and save it; nothing is generated."""
        return self._thread.run(
            self._aio.prefill_only(
                model_id, prompt, parent_key=parent_key, session_id=session_id,
                prefix_checkpoint_len=prefix_checkpoint_len, deadline_s=deadline_s,
            )
        )  # fmt: skip

    def stream_chat(
        self, model_id: str, messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[CompleteOptions],
    ) -> Stream:  # fmt: skip
        """Generate the next message of a chat, rendered by the model's own template."""
        return self._start(lambda: self._aio.stream_chat(model_id, messages, tools=tools, **options))

    def chat(
        self, model_id: str, messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[CompleteOptions],
    ) -> Completion:  # fmt: skip
        """Generate the next message of a chat; the whole reply."""
        return self._thread.run(self._aio.chat(model_id, messages, tools=tools, **options))

    def cancel(self, request_id: str) -> None:
        """End a request, whoever started it; unknown ids are fine."""
        self._thread.run(self._aio.cancel(request_id))

    def end_session(self, model_id: str, session_id: str) -> None:
        """End an idle session; its tokens are saved."""
        self._thread.run(self._aio.end_session(model_id, session_id))

    def reset_session(self, model_id: str, session_id: str) -> None:
        """End a session; a request that runs in it is cancelled."""
        self._thread.run(self._aio.reset_session(model_id, session_id))

    # --- text

    def tokenize(
        self, model_id: str, text: str | bytes, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of a text."""
        return self._thread.run(
            self._aio.tokenize(model_id, text, add_special=add_special, parse_special=parse_special)
        )

    def detokenize(self, model_id: str, ids: Sequence[int]) -> bytes:
        """The text of token ids, control tokens spelt out."""
        return self._thread.run(self._aio.detokenize(model_id, ids))

    def apply_chat_template(
        self, model_id: str, messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:  # fmt: skip
        """Token ids of a chat, rendered by the model's own template."""
        return self._thread.run(
            self._aio.apply_chat_template(model_id, messages, tools=tools, add_generation_prompt=add_generation_prompt)
        )

    def embed(self, model_id: str, prompt: Prompt) -> list[float]:
        """The embedding of a text."""
        return self._thread.run(self._aio.embed(model_id, prompt))

    # --- observers: none of these waits for a model process

    def models(self) -> list[ModelInfo]:
        """Every loaded model."""
        return self._thread.run(self._aio.models())

    def model_info(self, model_id: str) -> ModelInfo:
        """One model, or `NotFound`."""
        return self._thread.run(self._aio.model_info(model_id))

    def phase(self, model_id: str) -> str:
        """What a model is doing; `idle` for one that is not there."""
        return self._thread.run(self._aio.phase(model_id))

    def pending_len(self, model_id: str) -> int:
        """How many requests wait; 0 for a model that is not there."""
        return self._thread.run(self._aio.pending_len(model_id))

    def queue_depth(self, model_id: str | None = None) -> int:
        """How many requests run or wait, at one model or at all."""
        return self._thread.run(self._aio.queue_depth(model_id))

    def last_cache_hit(self, model_id: str) -> Fields | None:
        """`kind` and `prefix_tokens` of the last request; None before any."""
        return self._thread.run(self._aio.last_cache_hit(model_id))

    def counters(self) -> dict[str, int]:
        """The runtime's counters, by name."""
        return self._thread.run(self._aio.counters())

    def processes(self) -> dict[str, int]:
        """The process ids of the runtime, by the ids of its parts."""
        return self._thread.run(self._aio.processes())

    def restart(self, process_id: str) -> None:
        """Stop and start one process; returns when it is ready again."""
        self._thread.run(self._aio.restart(process_id))

    def status(self) -> dict[str, Any]:
        """The runtime at a glance."""
        return self._thread.run(self._aio.status())

    def recent_requests(self, limit: int = 20) -> list[dict[str, Any]]:
        """Statistics of the last finished requests, newest first."""
        return self._thread.run(self._aio.recent_requests(limit))
