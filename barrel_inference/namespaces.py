"""`client.cache` and `client.pressure`: what the index and the pressure poller can be asked."""

from collections.abc import Sequence
from typing import Any

from barrel_inference import protocol
from barrel_inference.errors import InvalidArgument
from barrel_inference.link import Link
from barrel_inference.loop_thread import LoopThread
from barrel_inference.protocol import PressureReply
from barrel_inference.request import convert
from barrel_inference.results import CacheRow, CacheStats, Fields, cache_stats_of, record_of


class AsyncCache:
    """`client.cache`: the cache index."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def dump(self, *, limit: int = 0, tier: str | None = None) -> list[CacheRow]:
        """Rows of the index, the latest used first; `limit` 0 = all."""
        message = convert({"limit": limit, "tier": tier}, protocol.Dump)
        rows = (await self._link.call("index", message, protocol.DumpRows)).rows
        return [record_of(CacheRow, row) for row in rows]

    async def stats(self) -> CacheStats:
        """Bytes, quotas and rows by tier."""
        return cache_stats_of(await self._link.call("index", protocol.CacheStats(), protocol.CacheStatsReply))

    async def gc(self) -> int:
        """Evict everything that is neither pinned nor in use; how many rows went."""
        return (await self._link.call("index", protocol.Evict(), protocol.Evicted)).rows

    async def evict_bytes(self, n: int, tiers: Sequence[str] | None = None) -> tuple[int, int]:
        """Free at least `n` bytes; the rows and bytes that went."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise InvalidArgument(f"n = {n!r} is no number of bytes", option="n")
        message = convert({"bytes": n, "tiers": None if tiers is None else list(tiers)}, protocol.Evict)
        evicted = await self._link.call("index", message, protocol.Evicted)
        return evicted.rows, evicted.bytes


class AsyncPressure:
    """`client.pressure`: the memory-pressure poller."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def _command(self, command: str, **values: Any) -> Fields:
        message = convert({"command": command, **values}, protocol.PressureCommand)
        return Fields((await self._link.call("pressure", message, PressureReply)).status)

    async def status(self) -> Fields:
        """Settings, last reading, what was evicted so far."""
        return await self._command("status")

    async def sample(self) -> Fields:
        """One reading of the source, without consequences."""
        return await self._command("sample")

    async def check(self) -> Fields:
        """One turn of the poller now: read, and evict if the reading is above the high watermark."""
        return await self._command("check")

    async def enable(self, enabled: bool = True) -> Fields:
        """Switch the poller on or off."""
        return await self._command("enable" if enabled else "disable")

    async def set_source(self, name: str) -> Fields:
        """Read another source: noop, system, nvidia_smi or module:NAME."""
        return await self._command("set_source", source=name)

    async def set_thresholds(self, high: float, low: float) -> Fields:
        """Move both watermarks."""
        return await self._command("set_thresholds", high=high, low=low)


class Cache:
    """`client.cache`: the cache index."""

    def __init__(self, thread: LoopThread, cache: AsyncCache) -> None:
        self._thread = thread
        self._aio = cache

    def dump(self, *, limit: int = 0, tier: str | None = None) -> list[CacheRow]:
        """Rows of the index, the latest used first; `limit` 0 = all."""
        return self._thread.run(self._aio.dump(limit=limit, tier=tier))

    def stats(self) -> CacheStats:
        """Bytes, quotas and rows by tier."""
        return self._thread.run(self._aio.stats())

    def gc(self) -> int:
        """Evict everything that is neither pinned nor in use; how many rows went."""
        return self._thread.run(self._aio.gc())

    def evict_bytes(self, n: int, tiers: Sequence[str] | None = None) -> tuple[int, int]:
        """Free at least `n` bytes; the rows and bytes that went."""
        return self._thread.run(self._aio.evict_bytes(n, tiers))


class Pressure:
    """`client.pressure`: the memory-pressure poller."""

    def __init__(self, thread: LoopThread, pressure: AsyncPressure) -> None:
        self._thread = thread
        self._aio = pressure

    def status(self) -> Fields:
        """Settings, last reading, what was evicted so far."""
        return self._thread.run(self._aio.status())

    def sample(self) -> Fields:
        """One reading of the source, without consequences."""
        return self._thread.run(self._aio.sample())

    def check(self) -> Fields:
        """One turn of the poller now: read, and evict if the reading is above the high watermark."""
        return self._thread.run(self._aio.check())

    def enable(self, enabled: bool = True) -> Fields:
        """Switch the poller on or off."""
        return self._thread.run(self._aio.enable(enabled))

    def set_source(self, name: str) -> Fields:
        """Read another source: noop, system, nvidia_smi or module:NAME."""
        return self._thread.run(self._aio.set_source(name))

    def set_thresholds(self, high: float, low: float) -> Fields:
        """Move both watermarks."""
        return self._thread.run(self._aio.set_thresholds(high, low))
