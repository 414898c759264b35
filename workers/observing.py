"""What observers ask the router: models, status, the last requests. No answer waits for a model process."""

import asyncio
import importlib.metadata
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from barrel_inference import protocol
from barrel_inference.actor import Actor, Request
from barrel_inference.errors import BarrelError
from barrel_inference.protocol import CacheStatsReply, ModelRows, PressureReply, RecentRows, StatusReply, TreeRows
from barrel_inference.workers.model.cores import usable_cores
from barrel_inference.workers.registry import Registry

# How long `status` waits for a helper before it answers without that part.
HELPER_DEADLINE_S = 0.5

KEPT_REQUESTS = 1000


class Observers:
    """Answers `models`, `status` and `recent_requests`."""

    def __init__(self, actor: Actor, registry: Registry) -> None:
        self.actor = actor
        self.registry = registry
        self.on_ended: Callable[[protocol.RequestEnded], None] | None = None  # the metrics', if there are any
        self._recent: deque[dict[str, Any]] = deque(maxlen=KEPT_REQUESTS)
        actor.on(protocol.Models, self.models)
        actor.on(protocol.Status, self.status)
        actor.on(protocol.RequestEnded, self._ended)
        actor.on(protocol.RecentRequests, self._recent_rows)

    def models(self, message: protocol.Models, _request: Request) -> ModelRows:
        """Every row, or one."""
        if message.model_id is None:
            return ModelRows(models=self.registry.rows())
        return ModelRows(models=[self.registry.row(message.model_id)])

    async def status(self, _message: protocol.Status, _request: Request) -> StatusReply:
        """The runtime at a glance."""
        return await self.look()

    async def look(self) -> StatusReply:
        """The runtime at a glance; a helper that does not answer in time is left out."""
        tree, cache, pressure = await asyncio.gather(self._tree(), self._cache(), self._pressure())
        return StatusReply(
            version=importlib.metadata.version("barrel-inference"), uptime_s=_process_age_s(os.getppid()),
            runtime_dir=str(self.actor.runtime_dir), state_dir=str(self.actor.state_dir),
            log_dir=self.actor.boot.settings["runtime"]["log_dir"],
            children=tree.children, supervisor_pid=tree.supervisor_pid, models=self.registry.rows(),
            tiers=[msgspec.to_builtins(tier) for tier in cache.tiers],
            pressure=pressure.status if pressure else None, cores=usable_cores(),
        )  # fmt: skip

    async def _tree(self) -> TreeRows:
        try:
            return await self.actor.supervisor.call(protocol.TreeStatus(), TreeRows, deadline_s=HELPER_DEADLINE_S)
        except BarrelError:
            return TreeRows(supervisor_pid=os.getppid(), children=[])

    async def _cache(self) -> CacheStatsReply:
        try:
            index = self.actor.peer("index")
            return await index.call(protocol.CacheStats(), CacheStatsReply, deadline_s=HELPER_DEADLINE_S)
        except BarrelError:
            return CacheStatsReply(tiers=[], namespaces=0, nodes=0, marks=0)

    async def counters(self) -> dict[str, int]:
        """Every counter; none while the index is down."""
        try:
            index = self.actor.peer("index")
            values = await index.call(protocol.Counters(), protocol.CounterValues, deadline_s=HELPER_DEADLINE_S)
        except BarrelError:
            return {}
        return values.counters

    async def _pressure(self) -> PressureReply | None:
        try:
            poller = self.actor.peer("pressure")
            command = protocol.PressureCommand(command="status")
            return await poller.call(command, PressureReply, deadline_s=HELPER_DEADLINE_S)
        except BarrelError:
            return None

    def _ended(self, message: protocol.RequestEnded, _request: Request) -> None:
        if self.on_ended is not None:
            self.on_ended(message)
        self._recent.append({"model_id": message.model_id, "request_id": message.request_id, **message.stats})

    def _recent_rows(self, message: protocol.RecentRequests, _request: Request) -> RecentRows:
        newest_first = list(reversed(self._recent))
        return RecentRows(requests=newest_first[: max(0, message.limit)])


def _process_age_s(pid: int) -> float:
    """Seconds since a process was started."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return round(max(0.0, up_s - ticks / os.sysconf("SC_CLK_TCK")), 3)
