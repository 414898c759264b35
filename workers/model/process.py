"""One model: owns the llama.cpp context, answers its requests, saves and restores its prefixes.

Run as `python -P -m barrel_inference.workers.model.process model:<id>`. Restart: after any exit but a wanted one; a model
that cannot load says so and stays down. While it is down its requests get `model_down` (or wait, if the client retries);
what it saved is in the tiers.

Two threads: this one (messages, index, files) and the engine's (`scheduler`), which alone touches the context.
"""

import asyncio
import functools
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from barrel_inference import protocol
from barrel_inference.actor import Actor, Peer, Request, run, settle
from barrel_inference.errors import BarrelError, DeadlineExceeded, InvalidArgument, NotSupported
from barrel_inference.protocol import Complete, Down, ModelRow, Phase
from barrel_inference.tiers import policy as policies
from barrel_inference.tiers.arena import Arena
from barrel_inference.tiers.policy import Policy
from barrel_inference.workers.model import options as model_options
from barrel_inference.workers.model import residency
from barrel_inference.workers.model.cache_client import CacheClient, image_bytes
from barrel_inference.workers.model.call_age import CallAge
from barrel_inference.workers.model.cores import leave_first_core, thread_share, usable_cores
from barrel_inference.workers.model.engine import Engine
from barrel_inference.workers.model.gateway import Gateway
from barrel_inference.workers.model.load import load_engine
from barrel_inference.workers.model.reporting import Rate
from barrel_inference.workers.model.scheduler import Scheduler
from barrel_inference.workers.model.state import Limits
from barrel_inference.workers.model.text import Markers

if TYPE_CHECKING:
    from barrel_inference.workers.model.chat import ChatTemplate

T = TypeVar("T")

# The GIL goes round this often: a token on its way out never waits 5 ms for a busy thread.
SWITCH_INTERVAL_S = 0.0005

WATCH_S = 0.25

# While it computes, its row goes to observers this often, for its rate alone.
ROW_S = 1.0

# What changes within this time is told at once: a row wakes the router, on cores that compute.
ROW_DELAY_S = 0.05


class ModelProcess:
    """The state of one model process, apart from the engine's."""

    engine: Engine
    scheduler: Scheduler
    cache: CacheClient

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.settings: dict[str, Any] = actor.boot.settings
        self.model_id = str(actor.boot.boot["model_id"])
        self.options = model_options.parse(actor.boot.boot["options"], self.settings)
        self.loaded_unix_s = 0.0
        self.adapters: tuple[tuple[str, float], ...] = self.options.adapters
        self.staging: Arena | None = None
        self.threads = 0
        self._adapters_lock = asyncio.Lock()
        # One thread for templates, which are foreign code: an endless one holds up chats and nothing else.
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="template")
        self._age = CallAge(time.monotonic())
        self._row_timer: asyncio.TimerHandle | None = None
        self._row_sent_s = 0.0
        self._rate = Rate()

    # --- start

    async def start(self, actor: Actor) -> dict[str, Any]:
        """Load the model; ready when it can answer."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        # On a thread that ends: with it go the OpenMP threads that computed for it, as libgomp spins less once they are too many.
        with ThreadPoolExecutor(1, thread_name_prefix="load") as own:
            self.engine = await actor.loop.run_in_executor(own, self._load)
        for warning in self.engine.info.warnings:
            actor.log.warning("model.warned", reason=warning)
        fingerprint = self.engine.info.fingerprint
        if self.adapters:
            fingerprint = await asyncio.to_thread(self.engine.set_adapters, self.adapters)
        info = self.engine.info
        policy = policies.make(self.options.policy, n_batch=info.n_batch)
        self.gateway = Gateway(
            actor,
            markers=_markers(self.options),
            render_chat=self._render_chat,
            row=self._row_now,
            on_changed=self._changed,
        )
        if self.options.llama and self.options.llama.pin_resident_after_first_request:
            self.gateway.on_first_end = lambda: actor.spawn(self._pin_resident())
        self.gateway.max_queue = int(self.settings["limits"]["max_queue_per_model"])
        block_tokens = self._block_tokens()
        self.scheduler = Scheduler(self.engine, self.gateway, self._limits(policy, block_tokens))
        self._open_staging()
        self.cache = CacheClient(
            actor, self.engine, self.scheduler, model_id=self.model_id, server=self.options.tier_server,
            block_tokens=block_tokens, min_reuse_tokens=policy.min_reuse_tokens,
            resume_wait_ms=policy.session_resume_wait_ms, evict_timeout_s=self._save_timeout_s(),
            deterministic=self.options.context.deterministic, staging=self.staging,
        )  # fmt: skip
        self.cache.fingerprint = fingerprint
        self.gateway.engine, self.gateway.scheduler, self.gateway.cache = self.engine, self.scheduler, self.cache
        self._register()
        self.loaded_unix_s = time.time()
        self.threads = info.n_threads
        self.scheduler.start()
        leave_first_core()  # the engine thread's: what it asks of this one and of the readers is done beside it
        if self.options.tier is not protocol.Tier.RAM:
            self.cache.warm_up()
        actor.call_age = self._call_age
        actor.every(WATCH_S, self._watch)
        return {"kind": "model", "row": msgspec.to_builtins(self._row(), builtin_types=(bytes,))}

    def _load(self) -> Engine:
        """Called on a thread of its own."""
        residency.raise_memlock_limit()
        return load_engine(
            self.options, state_dir=self.actor.state_dir, grammar_bytes=int(self.settings["limits"]["grammar_bytes"]),
            force=bool(self.actor.boot.boot.get("force")), on_progress=self._load_progress,
            log_line=lambda line: self.actor.log.debug("llama.said", line=line),
        )  # fmt: skip

    def _load_progress(self, fraction: float) -> None:
        """Called on the loading thread."""
        self.actor.loop.call_soon_threadsafe(
            self.actor.supervisor.cast, protocol.LoadProgress(fraction=fraction, model_id=self.model_id)
        )

    async def _pin_resident(self) -> None:
        """The first request has touched what requests touch: that stays in memory from now on."""
        pinned = await asyncio.to_thread(self.engine.pin_resident)
        self.actor.log.info("weights.pinned", bytes=pinned, limit=residency.memlock_advice())

    @functools.cached_property
    def _template(self) -> "ChatTemplate":
        """The model's own chat template, compiled when it is first needed; raises `NotSupported`."""
        from barrel_inference.workers.model.chat import ChatTemplate  # here: many models are never asked to chat

        info = self.engine.info
        if not info.chat_template:
            raise NotSupported(f"model {self.model_id!r} has no chat template", hint="send a plain prompt")
        return ChatTemplate(info.chat_template, bos_text=info.bos_text, eos_text=info.eos_text)

    def _save_timeout_s(self) -> float:
        return int(self.settings["cache"]["evict_save_timeout_ms"]) / 1000

    def _block_tokens(self) -> int:
        """Tokens of a node: no more than the window, or its own cells would not all be in its export."""
        configured = int(self.settings["cache"]["block_tokens"])
        info = self.engine.info
        wanted = min(configured, info.window_tokens) if info.window_tokens else configured
        return min(wanted, info.n_batch) if self.options.context.deterministic else wanted

    def _limits(self, policy: Policy, block_tokens: int) -> Limits:
        info = self.engine.info
        # Deterministic: slices end where nodes end, so that a restored prompt is cut exactly as a cold one.
        chunk = block_tokens if self.options.context.deterministic else min(policy.prefill_chunk_size, info.n_batch)
        return Limits(
            policy=policy, prefill_chunk=chunk, warm_cells=self.options.context.warm,
            deterministic=self.options.context.deterministic, block_tokens=block_tokens,
            decode_budget_ms=self.options.context.decode_budget_ms,
        )  # fmt: skip

    def _open_staging(self) -> None:
        """Saves to a file tier wait for their writer in memory of our own."""
        if self.options.tier == protocol.Tier.RAM or not self.engine.info.cacheable:
            return
        # A node for each writer at least, however large the model's are.
        size = max(int(self.settings["writer"]["staging_bytes"]), 2 * image_bytes(self.engine, self._block_tokens()))
        self.staging = Arena(size)
        self.staging.serve(self.actor.runtime_dir / f"{self.actor.id}.arena", self.actor.incarnation)

    def _register(self) -> None:
        on = self.actor.on
        on(protocol.EndSession, self._end_session)
        on(protocol.Tokenize, self._tokenize)
        on(protocol.Detokenize, self._detokenize)
        on(protocol.ApplyTemplate, self._apply_template)
        on(protocol.Embed, self._embed)
        on(protocol.SetAdapters, self._set_adapters)
        on(protocol.Adapters, lambda _message, _request: protocol.AdapterList(adapters=list(self.adapters)))
        on(protocol.ReleaseIdle, self._release_idle)
        on(protocol.ThreadShare, self._thread_share)
        self.actor.on_up(self._peer_up)
        self.actor.on_down(self._peer_down)
        for peer in list(self.actor.peers.values()):
            self._peer_up(peer)

    # --- requests other than `complete`

    async def _on_engine(self, start: Callable[[Callable[[T], None]], None]) -> T:
        """Run `start(done)` on the engine thread and wait until it calls `done` with the result."""
        future: asyncio.Future[T] = self.actor.loop.create_future()

        def done(result: T) -> None:
            self.actor.loop.call_soon_threadsafe(settle, future, result)

        self.scheduler.post(lambda: start(done))
        return await future

    async def _end_session(self, message: protocol.EndSession, request: Request) -> protocol.Ok:
        salt = self.gateway.salt(request)
        refused: BarrelError | None = await self._on_engine(
            lambda done: done(self.scheduler.end_session(message.session_id, salt, reset=message.reset))
        )
        if refused is not None:
            raise refused
        request.cast(self._row_now())
        return protocol.Ok()

    async def _tokenize(self, message: protocol.Tokenize, _request: Request) -> protocol.TokenIds:
        text = message.text.encode() if isinstance(message.text, str) else message.text
        if len(text) > protocol.MAX_TEXT_BYTES:
            raise InvalidArgument(f"a text of {len(text)} bytes, the limit is {protocol.MAX_TEXT_BYTES}")
        ids = await asyncio.to_thread(
            self.engine.tokenize, text, add_special=message.add_special, parse_special=message.parse_special
        )
        return protocol.TokenIds(ids=ids)

    def _detokenize(self, message: protocol.Detokenize, _request: Request) -> protocol.Text:
        wrong = next((t for t in message.ids if not 0 <= t < self.engine.info.n_vocab), None)
        if wrong is not None:
            raise InvalidArgument(f"ids has {wrong}, the vocabulary has {self.engine.info.n_vocab}")
        return protocol.Text(data=b"".join(map(self.engine.special_piece, message.ids)))

    async def _apply_template(self, message: protocol.ApplyTemplate, _request: Request) -> protocol.TokenIds:
        text = await self._rendered(message.messages, message.tools, message.add_generation_prompt)
        return protocol.TokenIds(ids=await self.gateway.tokens_of(text, add_special=False, parse_special=True))

    async def _render_chat(self, spec: Complete) -> bytes:
        return await self._rendered(spec.messages or [], spec.tools, True)

    async def _rendered(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, add_prompt: bool
    ) -> bytes:
        return await self.actor.loop.run_in_executor(self._renderer, self._render, messages, tools, add_prompt)

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, add_prompt: bool) -> bytes:
        return self._template.render(messages, tools=tools, add_generation_prompt=add_prompt)

    async def _embed(self, message: protocol.Embed, _request: Request) -> protocol.Vector:
        prompt = message.prompt
        if isinstance(prompt, list):
            tokens = prompt
        else:
            text = prompt.encode() if isinstance(prompt, str) else prompt
            tokens = await self.gateway.tokens_of(text, add_special=True, parse_special=False)
        self.gateway.check_prompt(tokens)
        result: list[float] | BarrelError = await self._on_engine(
            lambda done: done(_or_error(lambda: self.engine.embed(tokens)))
        )
        if isinstance(result, BarrelError):
            raise result
        return protocol.Vector(values=result)

    async def _set_adapters(self, message: protocol.SetAdapters, request: Request) -> protocol.AdapterList:
        """Wait until no request runs, end sessions with an evict save under the old namespace, then switch."""

        def change() -> bytes | BarrelError:
            return _or_error(lambda: self.engine.set_adapters(message.adapters))

        def paused(done: Callable[[bytes | BarrelError], None]) -> None:
            self.scheduler.empty(lambda: done(change()))

        async with self._adapters_lock:  # a resume must not let requests start while the next change is on its way
            result: bytes | BarrelError = await self._on_engine(lambda done: self.scheduler.pause(lambda: paused(done)))
            if isinstance(result, bytes):
                self.cache.fingerprint = result
                self.adapters = tuple((path, scale) for path, scale in message.adapters)
            self.scheduler.post(self.scheduler.resume)
            if isinstance(result, bytes):
                await self._keep_adapters()
        if isinstance(result, BarrelError):
            raise result
        request.cast(self._row_now())
        return protocol.AdapterList(adapters=list(self.adapters))

    async def _keep_adapters(self) -> None:
        """If this process dies, its successor starts with the adapters in use."""
        boot = self.actor.boot.boot
        boot["options"] = {**boot["options"], "adapters": list(self.adapters)}
        await self.actor.supervisor.call(
            protocol.ChangeBoot(id=self.actor.id, incarnation=self.actor.incarnation, boot=boot), protocol.Ok
        )

    async def _release_idle(self, _message: protocol.ReleaseIdle, _request: Request) -> protocol.Evicted:
        freed: int = await self._on_engine(self.scheduler.release_idle)
        self._send_row()
        return protocol.Evicted(rows=freed, bytes=0)

    def _thread_share(self, message: protocol.ThreadShare, _request: Request) -> None:
        # Deterministic: the number of threads decides how sums are split.
        models = 1 if self.options.context.deterministic else message.computing_models
        share = thread_share(usable_cores(), models)
        self.threads = min(self.engine.info.n_threads, share)
        self.scheduler.post(lambda: self.engine.set_threads(share))
        self._changed()

    # --- peers and observers

    def _peer_up(self, peer: Peer) -> None:
        if peer.id == "router":
            self._send_row()

    def _peer_down(self, down: Down) -> None:
        self.gateway.peer_down(down.id)
        self.cache.reader.drop(down.id, down.incarnation)

    def _changed(self) -> None:
        if self._row_timer is None:
            self._row_timer = self.actor.loop.call_later(ROW_DELAY_S, self._send_row)

    def _send_row(self) -> None:
        self.actor.cast("router", self._row_now())

    def _row_now(self) -> ModelRow:
        """To be sent at once: by the way of an answer, so that who has that finds the row up to date."""
        if self._row_timer is not None:
            self._row_timer.cancel()
            self._row_timer = None
        self._row_sent_s = time.monotonic()
        return self._row()

    def _row(self) -> ModelRow:
        info, scheduler = self.engine.info, self.scheduler
        return ModelRow(
            model_id=self.model_id, incarnation=self.actor.incarnation, backend=self.options.backend,
            phase=scheduler.phase() if self.loaded_unix_s else Phase.LOADING, pending_len=self.gateway.waiting(),
            running=len(scheduler.running), last_cache_hit=self.gateway.last_hit, context_size=info.n_ctx,
            quant_type=info.quant_type, quant_bits=info.quant_bits, fingerprint=self.cache.fingerprint,
            tier=self.options.tier, n_seq_max=info.n_seq_max, available_seqs=scheduler.table.available(),
            pinned_idle_seqs=scheduler.table.pinned_idle(), memory_bytes=info.memory_bytes,
            loaded_at=self.loaded_unix_s, last_used_unix_s=self.gateway.last_used_unix_s, threads=self.threads,
            tokens_per_s=self._rate.per_s(scheduler.generated_tokens, time.monotonic()) if scheduler.running else 0.0,
        )  # fmt: skip

    def _call_age(self) -> tuple[int, int]:
        age_s = self._age.at(time.monotonic(), self.scheduler.call_began_s)
        return int(age_s * 1000), self.options.context.decode_budget_ms

    def _watch(self) -> None:
        age_ms, budget_ms = self._call_age()
        if budget_ms and age_ms > budget_ms:
            self.engine.interrupt()
        self._note_rate()

    def _note_rate(self) -> None:
        """Observers see how fast it generates now, a stall included, and 0 once it rests."""
        if self.scheduler.phase() is Phase.GENERATING:
            self._rate.note(self.scheduler.generated_tokens, time.monotonic())
        else:
            self._rate.rest()
        if self.scheduler.running and time.monotonic() - self._row_sent_s > ROW_S:
            self._changed()

    # --- stop

    async def drain(self, _actor: Actor) -> None:
        """End every stream, save every sequence, most valuable first, within `evict_save_timeout_ms`."""
        self.gateway.stop()
        timeout_s = self._save_timeout_s()
        try:
            async with asyncio.timeout(timeout_s):
                await self._on_engine(self.scheduler.save_everything)
                await self.gateway.saves()
        except TimeoutError:
            self.actor.log.warning("shutdown.save_timed_out", error=DeadlineExceeded.code, timeout_s=timeout_s)
        await self.gateway.close()
        self.scheduler.stop()
        await asyncio.to_thread(self.scheduler.join, 5.0)
        if self.staging is not None:
            self.staging.close()
        self.engine.close()


def _markers(options: model_options.LoadOptions) -> Markers:
    def pair(markers: model_options.Markers | None) -> tuple[bytes, bytes] | None:
        return (markers.start.encode(), markers.end.encode()) if markers else None

    return Markers(pair(options.thinking_markers), pair(options.tool_call_markers))


def _or_error(function: Callable[[], T]) -> T | BarrelError:
    """The result, or the expected error as a value: it has to cross a thread."""
    try:
        return function()
    except BarrelError as error:
        return error


def main() -> int:
    """The process's life; returns its exit status."""
    process: list[ModelProcess] = []

    def make(actor: Actor) -> Callable[[Actor], Awaitable[dict[str, Any] | None]]:
        async def start(actor: Actor) -> dict[str, Any]:
            model = ModelProcess(actor)
            process.append(model)
            return await model.start(actor)

        return start

    return run(make, drain=lambda actor: process[0].drain(actor))


if __name__ == "__main__":
    sys.exit(main())
