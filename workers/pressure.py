"""The memory-pressure poller: reads a source, and evicts, releases and unloads when it is above its high watermark.

Run: `python -P -m barrel_inference.workers.pressure pressure`, started by the supervisor at nice 19, permanent. It keeps
nothing: a restart takes the settings of the configuration.

A pass asks the index to evict from the tiers of `pressure.evict_tiers`, step by step. When that is not enough, or the
source is a GPU's, and `unload_models_under_pressure` allows it, idle models save and free their idle sequences; then the
least recently used idle model is unloaded, one after the other. How far to go is decided in `watermarks`.
"""

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from barrel_inference import actor as actors
from barrel_inference import protocol
from barrel_inference.actor import Actor, Request
from barrel_inference.errors import BarrelError, InvalidArgument, NotFound, NotSupported, Overloaded
from barrel_inference.protocol import Evicted, ModelRow, Phase, PressureReply
from barrel_inference.workers.pressure_sources import Source, SourceFailed, open_source
from barrel_inference.workers.watermarks import Action, Next, Pass, Reading, Rules, watermarks

# A source that takes longer than this hangs. Above what nvidia-smi may take.
SAMPLE_TIMEOUT_S = 8.0
EVICT_DEADLINE_S = 30.0
ROUTER_DEADLINE_S = 2.0

T = TypeVar("T")


class PressureProcess:
    """The process: a timer and commands, both of which run one pass at a time."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self._timer: asyncio.TimerHandle | None = None
        self._take_settings()
        self.reading = Reading(0, 0)
        self.last_result: str | None = None
        self.evicted_bytes_total = 0
        self.models_unloaded_total = 0
        self._sampling: asyncio.Future[Any] | None = None
        self._turn = asyncio.Lock()
        actor.on(protocol.PressureCommand, self.command)
        actor.on_reconfigured(self._reconfigured)

    async def serve(self, _actor: Actor) -> dict[str, Any]:
        """Start the timer."""
        self._tick()
        return {}

    def _take_settings(self) -> None:
        settings = self._settings = self.actor.boot.settings["pressure"]
        self.enabled: bool = settings["enabled"]
        self.source_name: str = settings["pressure_source"]
        self.marks = watermarks(settings["high_watermark"], settings["low_watermark"])
        self.min_evict_bytes: int = settings["min_evict_bytes"]
        self.evict_tiers: list[str] = settings["evict_tiers"]
        self.may_unload: bool = settings["unload_models_under_pressure"]
        self.interval_s: float = settings["interval_ms"] / 1000
        self._source: Source | None = None  # opened when it is first read

    def _reconfigured(self) -> None:
        """What was set at run time holds until the configuration itself says something else."""
        if self.actor.boot.settings["pressure"] != self._settings:
            self._take_settings()
            self._tick()

    def _tick(self) -> None:
        """A pass, unless one is under way or the poller is off; off, it does not even wake up."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.enabled:
            self._timer = self.actor.loop.call_later(self.interval_s, self._tick)
            if not self._turn.locked():
                self.actor.spawn(self._check())

    # --- commands

    async def command(self, message: protocol.PressureCommand, _request: Request) -> PressureReply:
        """Do what a client asks, and say how things are then."""
        match message.command:
            case "status":
                pass
            case "sample":
                await self._sample_now()
            case "check":
                await self._check()
            case "enable":
                self.enabled = True
                self._tick()
            case "disable":
                self.enabled = False
                self._tick()
            case "set_source":
                await self._set_source(message.source)
            case "set_thresholds":
                self.marks = watermarks(message.high, message.low)
            case unknown:
                raise InvalidArgument(
                    f"command = {unknown[:100]!r} is none",
                    hint="use status, sample, check, enable, disable, set_source or set_thresholds", option="command",
                )  # fmt: skip
        return PressureReply(status=self.status())

    def status(self) -> dict[str, Any]:
        """Settings, the last reading, and what was done so far."""
        return {
            "enabled": self.enabled, "source": self.source_name,
            "used_bytes": self.reading.used_bytes, "total_bytes": self.reading.total_bytes,
            "ratio": self.reading.ratio, "high_watermark": self.marks.high, "low_watermark": self.marks.low,
            "last_result": self.last_result, "evicted_bytes_total": self.evicted_bytes_total,
            "models_unloaded_total": self.models_unloaded_total, "stall_share": self.reading.stall_share,
        }  # fmt: skip

    async def _sample_now(self) -> None:
        try:
            await self._read()
        except SourceFailed as failed:
            raise NotSupported(f"source {self.source_name!r} gives no reading: {failed}") from None

    async def _set_source(self, name: str | None) -> None:
        if name is None:
            raise InvalidArgument("source is missing", hint="use noop, system, nvidia_smi or module:NAME")
        async with self._turn:  # a pass ends with the source that it began with
            try:
                self._source = await self._in_thread(lambda: open_source(name))
            except SourceFailed as hangs:
                raise NotSupported(f"source {name!r} cannot be opened: {hangs}") from None
            self.source_name = name
            self.reading, self.last_result = Reading(0, 0), None

    # --- readings

    async def _read(self) -> Reading:
        """A new reading; raises `SourceFailed`."""
        if self._source is None:
            name = self.source_name
            try:
                self._source = await self._in_thread(lambda: open_source(name))
            except InvalidArgument as wrong:
                raise SourceFailed(str(wrong)) from None
        self.reading = await self._in_thread(self._source.sample)
        return self.reading

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """Call what may block, for so long; raises `SourceFailed` when it hangs.

        A thread of its own that nobody waits for at exit: a driver that hangs must not keep this process.
        """
        if self._sampling is not None and not self._sampling.done():
            await asyncio.wait([self._sampling], timeout=SAMPLE_TIMEOUT_S)
            if not self._sampling.done():
                raise SourceFailed("the last reading still hangs")
        loop = self.actor.loop
        future: asyncio.Future[T] = loop.create_future()
        self._sampling = future

        def work() -> None:
            try:
                result = function()
            except (SourceFailed, BarrelError) as error:
                loop.call_soon_threadsafe(_settle_error, future, error)
            except Exception as bug:  # it would vanish with the thread; the caller's task ends the process with it
                loop.call_soon_threadsafe(_settle_error, future, bug)
            else:
                loop.call_soon_threadsafe(actors.settle, future, result)

        threading.Thread(target=work, name="source", daemon=True).start()
        done, _ = await asyncio.wait([future], timeout=SAMPLE_TIMEOUT_S)
        if not done:
            raise SourceFailed(f"no reading within {SAMPLE_TIMEOUT_S:g} s")
        return future.result()

    # --- a pass

    async def _check(self) -> None:
        async with self._turn:
            try:
                result = await self._pass()
            except SourceFailed as failed:
                result = f"source_failed: {failed}"
            except BarrelError as failed:  # the index or the router is being restarted: the next pass finds it again
                result = f"interrupted: {failed}"
        if result != self.last_result or result == "relieved":
            is_bad = result.startswith(("source_failed", "interrupted", "no_effect", "exhausted"))
            (self.actor.log.warning if is_bad else self.actor.log.info)(
                "pressure.checked", result=result, ratio=round(self.reading.ratio, 4), source=self.source_name
            )
        self.last_result = result

    async def _pass(self) -> str:
        """Read and act until the pass ends; why it did."""
        reading = await self._read()
        run = Pass(Rules(self.marks, self.min_evict_bytes, bool(self.evict_tiers), self.may_unload))
        step = run.begin(reading)
        while step.action is not Action.END:
            freed = await self._do(step)
            step = run.after(step, await self._read(), freed)
        return step.result

    async def _do(self, step: Next) -> int:
        match step.action:
            case Action.EVICT:
                return await self._evict(step.size_bytes)
            case Action.RELEASE:
                return await self._release()
            case _:
                return await self._unload()

    async def _evict(self, size_bytes: int) -> int:
        """Free so many bytes of the configured tiers; how many it were."""
        message = protocol.Evict(bytes=size_bytes, tiers=[f"tier:{name}" for name in self.evict_tiers])
        freed = (await self.actor.peer("index").call(message, Evicted, deadline_s=EVICT_DEADLINE_S)).bytes
        self.evicted_bytes_total += freed
        self.actor.log.info("pressure.evicted", wanted_bytes=size_bytes, freed_bytes=freed)
        return freed

    async def _idle_models(self) -> list[ModelRow]:
        """Models without a request, the least recently used first."""
        rows = await self.actor.peer("router").call(protocol.Models(), protocol.ModelRows, deadline_s=ROUTER_DEADLINE_S)
        idle = [row for row in rows.models if row.phase is Phase.IDLE and not row.running and not row.pending_len]
        return sorted(idle, key=lambda row: row.last_used_unix_s or row.loaded_at)

    async def _release(self) -> int:
        """Have idle models save and free their idle sequences; how many it were."""
        freed = 0
        for row in await self._idle_models():
            model = self.actor.peers.get(f"model:{row.model_id}")
            if model is not None:
                freed += (await model.call(protocol.ReleaseIdle(), Evicted, deadline_s=EVICT_DEADLINE_S)).rows
        return freed

    async def _unload(self) -> int:
        """Unload one model that is still idle; 0 when none is.

        Through the router, not by the supervisor's `StopChild`: new requests are refused while it saves, and observers
        are told that it was unloaded, not that it failed.
        """
        for row in await self._idle_models():
            message = protocol.Unload(model_id=row.model_id, if_idle=True)
            try:
                await self.actor.peer("router").call(
                    message, protocol.Ok
                )  # its shutdown save has a deadline of its own
            except (NotFound, Overloaded):  # unloaded by somebody else, or a request has come in
                continue
            self.models_unloaded_total += 1
            self.actor.log.warning("pressure.unloaded", model_id=row.model_id, ratio=round(self.reading.ratio, 4))
            return 1
        return 0


def _settle_error(future: "asyncio.Future[Any]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # seen: whoever waited may have given up


def main() -> int:
    """The process's life; its exit status."""
    return actors.run(lambda actor: PressureProcess(actor).serve)


if __name__ == "__main__":
    sys.exit(main())
