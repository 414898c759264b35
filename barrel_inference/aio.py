"""AsyncClient: the client for asyncio programs. `Client` is the same on a thread of its own."""

import os
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

import msgspec

from barrel_inference import codec, protocol, resubmission
from barrel_inference.errors import AlreadyLoaded, InvalidArgument, NotFound
from barrel_inference.link import Deadline, Link, endpoint_of
from barrel_inference.namespaces import AsyncCache, AsyncPressure
from barrel_inference.protocol import LoadProgress
from barrel_inference.request import (
    CompleteOptions,
    ContinueOptions,
    Messages,
    Prompt,
    build,
    check_deadline,
    checked_prompt,
    convert,
)  # fmt: skip
from barrel_inference.resubmission import ConnectionLost, Tally
from barrel_inference.results import (
    Completion,
    Fields,
    ModelInfo,
    model_info_of,
)  # fmt: skip
from barrel_inference.stream import AsyncStream
from barrel_inference.workers.model import model_path as model_paths

Adapters = Sequence[tuple[str | os.PathLike[str], float]]


# Of a reply that is read as a whole; what has arrived counts when its model dies.
WHOLE_REPLY_INTERVAL_MS = 250

Options = TypeVar("Options", CompleteOptions, ContinueOptions)


class LoadOptions(TypedDict, total=False):
    """The options of `load_model`; docs/reference/load-options.md has each with its default."""

    backend: str  # llama, stub
    model_opts: Mapping[str, Any] | None
    context_opts: Mapping[str, Any] | None
    fingerprint: bytes | str | None
    fingerprint_mode: str  # safe, gguf_chunked, fast_unsafe
    quant_type: str | None
    quant_bits: int | None
    ctx_params_hash: bytes | str | None
    context_size: int | None
    tier: str  # ram, ram_file, disk
    tier_srv: str | None
    policy: Mapping[str, Any] | None
    adapters: Adapters | None
    thinking_markers: Sequence[str] | Mapping[str, str] | None
    tool_call_markers: Sequence[str] | Mapping[str, str] | None


class AsyncClient:
    """Everything a runtime can be asked. Use it on one event loop; it connects when it is first used.

    Args:
        endpoint: the router's; default `$BARREL_ENDPOINT`, else this user's runtime.
        timeout_s: how long a call may take that is given no deadline of its own; None = without end.
        retry: True: a call whose process dies is made again and its caller sees a pause; False: an error.
    """

    def __init__(self, endpoint: str | None = None, *, timeout_s: float | None = None, retry: bool = True) -> None:
        check_deadline(timeout_s, "timeout_s")
        self._link = Link(endpoint_of(endpoint), timeout_s=timeout_s, retry=retry)
        self._streams: weakref.WeakSet[AsyncStream] = weakref.WeakSet()
        self.cache = AsyncCache(self._link)
        self.pressure = AsyncPressure(self._link)

    @property
    def endpoint(self) -> str:
        """Where the runtime is expected."""
        return self._link.endpoint

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; requests under way are cancelled."""
        for stream in list(self._streams):
            await stream.cut_off()
        self._link.close()

    # --- models

    async def load_model(
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
        message = _load_message(model_path, model_id, options, force=force)
        return await self.load_as_given(message, on_progress=on_progress)

    async def estimate(self, model_path: str | os.PathLike[str], **options: Unpack[LoadOptions]) -> dict[str, int]:
        """Bytes that a load would take (`weights`, `kv`, `compute`), those it `needed` to find, and those `available`."""
        return await self.estimate_as_given(_load_message(model_path, None, options, force=False))

    async def estimate_as_given(self, message: protocol.LoadModel) -> dict[str, int]:
        """An estimate for options that are not looked at here."""
        asked = msgspec.structs.replace(message, dry_run=True)
        return (await self._link.call("router", asked, protocol.Loaded)).estimate

    async def load_as_given(
        self, message: protocol.LoadModel, *, on_progress: Callable[[float], object] | None = None
    ) -> str:
        """Load with options that are not looked at here: the router knows the names of `[models]`."""

        def tell(_kind: str, body: bytes) -> None:
            if on_progress is not None:
                on_progress(codec.decode(body, LoadProgress).fraction)

        credit = protocol.CREDIT_EVENTS if on_progress else 0
        deadline = Deadline(self._link.timeout_s)
        tally = Tally()
        while True:
            try:
                loaded = await self._link.call(
                    "router",
                    message,
                    protocol.Loaded,
                    deadline_s=deadline.left_s,
                    credit=credit,
                    on_event=tell,
                    again=False,
                )
                return loaded.model_id
            except ConnectionLost as lost:
                tally = resubmission.after(lost, tally, retry=self._link.retry)
            except AlreadyLoaded:
                if not tally.survived or message.model_id is None:
                    raise
                # The load that we asked for went on while the router was away.
                await self._link.wait_until_back(f"model:{message.model_id}", deadline)
                return message.model_id

    async def unload(self, model_id: str) -> None:
        """Unload; returns when the shutdown save is done and the process is gone."""
        message = convert({"model_id": model_id}, protocol.Unload)
        tally = Tally()
        while True:
            try:
                await self._link.call("router", message, protocol.Ok, again=False)
                return
            except ConnectionLost as lost:
                tally = resubmission.after(lost, tally, retry=self._link.retry)
            except NotFound:
                if not tally.survived:
                    raise
                return  # it went on while the router was away

    async def set_adapters(self, model_id: str, adapters: Adapters) -> list[tuple[str, float]]:
        """Replace the adapters once no request runs; ends the model's sessions."""
        message = convert({"adapters": adapters_of(adapters)}, protocol.SetAdapters)
        return _adapters_from(await self._link.call(f"model:{model_id}", message, protocol.AdapterList))

    async def adapters(self, model_id: str) -> list[tuple[str, float]]:
        """The adapters in use."""
        return _adapters_from(await self._link.call(f"model:{model_id}", protocol.Adapters(), protocol.AdapterList))

    # --- requests

    def stream(self, model_id: str, prompt: Prompt, **options: Unpack[CompleteOptions]) -> AsyncStream:
        """Generate; the stream is under way at once."""
        return self._stream(model_id, "complete", prompt, options)

    async def complete(self, model_id: str, prompt: Prompt, **options: Unpack[CompleteOptions]) -> Completion:
        """Generate; the whole reply."""
        return await self._collect(self.stream(model_id, prompt, **_whole(options)))

    def stream_continue(
        self, model_id: str, suffix: Prompt, *, session_id: str, expect_committed: Sequence[int] | None = None,
        **options: Unpack[ContinueOptions],
    ) -> AsyncStream:  # fmt: skip
        """Append to a session and generate."""
        given = {**options, "session_id": session_id}
        if expect_committed is not None:
            given["expect_committed"] = list(expect_committed)
        return self._stream(model_id, "continue", suffix, given)

    async def continue_(
        self, model_id: str, suffix: Prompt, *, session_id: str, expect_committed: Sequence[int] | None = None,
        **options: Unpack[ContinueOptions],
    ) -> Completion:  # fmt: skip
        """Append to a session and generate; the whole reply."""
        stream = self.stream_continue(
            model_id, suffix, session_id=session_id, expect_committed=expect_committed, **_whole(options)
        )
        return await self._collect(stream)

    async def prefill_only(
        self, model_id: str, prompt: Prompt, *, parent_key: bytes | None = None, session_id: str | None = None,
        prefix_checkpoint_len: int | None = None, deadline_s: float | None = None,
    ) -> Completion:  # fmt: skip
        """Compute a prompt and save it; nothing is generated."""
        options: CompleteOptions = {
            "parent_key": parent_key, "session_id": session_id, "prefix_checkpoint_len": prefix_checkpoint_len,
            "deadline_s": deadline_s,
        }  # fmt: skip
        return await self._collect(self._stream(model_id, "prefill", prompt, options))

    def stream_chat(
        self, model_id: str, messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[CompleteOptions],
    ) -> AsyncStream:  # fmt: skip
        """Generate the next message of a chat, rendered by the model's own template."""
        return self._stream(model_id, "complete", "", options, messages=messages, tools=tools)

    async def chat(
        self, model_id: str, messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[CompleteOptions],
    ) -> Completion:  # fmt: skip
        """Generate the next message of a chat; the whole reply."""
        return await self._collect(self.stream_chat(model_id, messages, tools=tools, **_whole(options)))

    def _stream(
        self, model_id: str, mode: str, prompt: Prompt, options: Mapping[str, Any], *,
        messages: Messages | None = None, tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> AsyncStream:  # fmt: skip
        request = build(mode, prompt, options, messages=messages, tools=tools)
        deadline_s = options.get("deadline_s")
        stream = AsyncStream(self._link, model_id, request, self._link.timeout_s if deadline_s is None else deadline_s)
        self._streams.add(stream)
        return stream

    async def _collect(self, stream: AsyncStream) -> Completion:
        async with stream:
            return await stream.result()

    async def cancel(self, request_id: str) -> None:
        """End a request, whoever started it; unknown ids are fine."""
        await self._link.cast("router", protocol.Cancel(request_id=request_id))

    async def end_session(self, model_id: str, session_id: str) -> None:
        """End an idle session; its tokens are saved."""
        await self._link.call(f"model:{model_id}", protocol.EndSession(session_id=session_id), protocol.Ok)

    async def reset_session(self, model_id: str, session_id: str) -> None:
        """End a session; a request that runs in it is cancelled."""
        message = protocol.EndSession(session_id=session_id, reset=True)
        await self._link.call(f"model:{model_id}", message, protocol.Ok)

    # --- text

    async def tokenize(
        self, model_id: str, text: str | bytes, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of a text."""
        if not isinstance(text, (str, bytes)):
            raise InvalidArgument(f"text is a {type(text).__name__}", hint="give text or bytes", option="text")
        values = {
            "text": checked_prompt(text, may_be_empty=True, name="text"), "add_special": add_special,
            "parse_special": parse_special,
        }  # fmt: skip
        return (await self._link.call(f"model:{model_id}", convert(values, protocol.Tokenize), protocol.TokenIds)).ids

    async def detokenize(self, model_id: str, ids: Sequence[int]) -> bytes:
        """The text of token ids, control tokens spelt out."""
        message = convert({"ids": list(ids)}, protocol.Detokenize)
        return (await self._link.call(f"model:{model_id}", message, protocol.Text)).data

    async def apply_chat_template(
        self, model_id: str, messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:  # fmt: skip
        """Token ids of a chat, rendered by the model's own template."""
        values = {
            "messages": [dict(message) for message in messages], "tools": tools and [dict(tool) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        message = convert(values, protocol.ApplyTemplate)
        return (await self._link.call(f"model:{model_id}", message, protocol.TokenIds)).ids

    async def embed(self, model_id: str, prompt: Prompt) -> list[float]:
        """The embedding of a text."""
        message = protocol.Embed(prompt=checked_prompt(prompt))
        return (await self._link.call(f"model:{model_id}", message, protocol.Vector)).values

    # --- observers: none of these waits for a model process

    async def models(self) -> list[ModelInfo]:
        """Every loaded model."""
        rows = (await self._link.call("router", protocol.Models(), protocol.ModelRows)).models
        return [model_info_of(row) for row in rows]

    async def model_info(self, model_id: str) -> ModelInfo:
        """One model, or `NotFound`."""
        return model_info_of(await self._link.row(model_id))

    async def phase(self, model_id: str) -> str:
        """What a model is doing; `idle` for one that is not there."""
        info = await self._info_or_none(model_id)
        return info.phase if info else protocol.Phase.IDLE

    async def pending_len(self, model_id: str) -> int:
        """How many requests wait; 0 for a model that is not there."""
        info = await self._info_or_none(model_id)
        return info.pending_len if info else 0

    async def queue_depth(self, model_id: str | None = None) -> int:
        """How many requests run or wait, at one model or at all."""
        return sum(info.running + info.pending_len for info in await self.models() if model_id in (None, info.model_id))

    async def last_cache_hit(self, model_id: str) -> Fields | None:
        """`kind` and `prefix_tokens` of the last request; None before any."""
        info = await self._info_or_none(model_id)
        return info.last_cache_hit if info else None

    async def _info_or_none(self, model_id: str) -> ModelInfo | None:
        try:
            return await self.model_info(model_id)
        except NotFound:
            return None

    async def counters(self) -> dict[str, int]:
        """The runtime's counters, by name."""
        return (await self._link.call("index", protocol.Counters(), protocol.CounterValues)).counters

    async def processes(self) -> dict[str, int]:
        """The process ids of the runtime, by the ids of its parts."""
        tree = await self._link.call("supervisor", protocol.TreeStatus(), protocol.TreeRows)
        return {"supervisor": tree.supervisor_pid} | {
            child.id: child.pid for child in tree.children if child.pid is not None
        }

    async def restart(self, process_id: str) -> None:
        """Stop and start one process; returns when it is ready again."""
        await self._link.call("supervisor", protocol.RestartChild(id=process_id), protocol.Ok)

    async def status(self) -> dict[str, Any]:
        """The runtime at a glance."""
        reply = await self._link.call("router", protocol.Status(), protocol.StatusReply)
        found = msgspec.to_builtins(reply, builtin_types=(bytes,))
        assert isinstance(found, dict)
        return found

    async def recent_requests(self, limit: int = 20) -> list[dict[str, Any]]:
        """Statistics of the last finished requests, newest first."""
        message = convert({"limit": limit}, protocol.RecentRequests)
        return (await self._link.call("router", message, protocol.RecentRows)).requests


def _whole(options: Options) -> Options:
    """The options for a reply that nobody reads piece by piece."""
    return {"event_interval_ms": WHOLE_REPLY_INTERVAL_MS, **options}


def load_options(model_path: str | os.PathLike[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a load as they travel: paths absolute, absent ones left out."""
    given = {key: value for key, value in options.items() if value is not None}
    path = os.fspath(model_path)
    if not isinstance(path, str) or not path:
        raise InvalidArgument(f"model_path = {model_path!r} is no path", option="model_path")
    is_name = given.get("backend") == "stub" or may_be_name(path)
    given["model_path"] = path if is_name else model_paths.as_text(absolute(path))
    if "adapters" in given:
        given["adapters"] = adapters_of(given["adapters"])
    return given


def _load_message(
    model_path: str | os.PathLike[str], model_id: str | None, options: Mapping[str, Any], *, force: bool
) -> protocol.LoadModel:
    given = load_options(model_path, options)
    if model_id is None and (given.get("backend") == "stub" or not may_be_name(given["model_path"])):
        model_id = f"barrel_inference_model_{secrets.randbelow(10**9)}"
    return convert({"model_id": model_id, "options": given, "force": force}, protocol.LoadModel)


def may_be_name(path: str) -> bool:
    """Could it be the name of a `[models]` table? A file that is there wins."""
    return not path.startswith("pkg:") and "/" not in path and not path.endswith(".gguf") and not os.path.exists(path)


def absolute(path: str) -> str:
    """The absolute path of a model file, also of one that a Python distribution ships (`pkg:NAME`)."""
    return os.path.abspath(os.path.expanduser(model_paths.resolve(path)))


def adapters_of(given: Any) -> list[Any]:
    """Adapters as they travel: paths absolute. What is no (path, scale) is left for the model to refuse."""
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise InvalidArgument(f"adapters = {given!r} is no list of (path, scale)", option="adapters")
    return [
        (_adapter_path(os.fspath(item[0])), item[1])
        if isinstance(item, Sequence) and len(item) == 2 and isinstance(item[0], (str, os.PathLike))
        else item
        for item in given
    ]


def _adapter_path(path: str) -> str:
    return model_paths.as_text(os.path.abspath(os.path.expanduser(model_paths.from_text(path))))


def _adapters_from(reply: protocol.AdapterList) -> list[tuple[str, float]]:
    return [(model_paths.from_text(path), scale) for path, scale in reply.adapters]
