"""One cache tier as a process: it keeps images for the index, in memory or in files.

Run: `python -P -m barrel_inference.tiers.tier tier:ram` (its kind is in the boot document), started by the supervisor,
permanent. While it is down, its copies cannot be found and nothing is saved there; the others go on. A RAM tier's images are
gone with it; a file tier's are all found again.

Everything that touches the store runs in one thread beside the loop, in the order in which the messages came: the store
needs no lock, and a slow disk does not keep the process from answering and beating.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from barrel_inference import actor as actors
from barrel_inference import protocol
from barrel_inference.actor import Actor, Peer, Request
from barrel_inference.errors import BarrelError, InvalidArgument
from barrel_inference.protocol import StoredRow, Tier
from barrel_inference.tiers.headroom import free_memory_bytes
from barrel_inference.tiers.leases import Owner
from barrel_inference.tiers.store import Scan, Store, Want
from barrel_inference.tiers.store_files import FileStore
from barrel_inference.tiers.store_memory import MemoryStore

# Rows per replay message: a few MiB of ordinary nodes, so that the index answers others in between.
REPLAY_ROWS = 500
# Texts may be longer than usual; a message must stay far below the transport's limit.
REPLAY_BYTES = 16 * 1024 * 1024
INDEX_DEADLINE_S = 30.0
# Between two attempts to tell an index that did not answer in time.
REPLAY_PAUSE_S = 1.0
FLUSH_S = 5.0
SWEEP_S = 30.0

T = TypeVar("T")


class TierBoot(msgspec.Struct, frozen=True):
    """This process's part of the boot document."""

    kind: Tier
    name: str  # its table in the settings, where the quota is
    root: str = ""
    sweep_s: float = SWEEP_S


class TierProcess:
    """The process: messages in, store jobs, answers out."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.options = msgspec.convert(actor.boot.boot, TierBoot)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self.store: Store[Any]
        self.dead_pids: frozenset[int] = frozenset()
        self._pids: dict[tuple[str, int], int] = {}
        self._wanted_bytes = self._configured_bytes()
        self._replay: asyncio.Task[None] | None = None
        self._sweeping = False
        self._draining = False
        self._closed = False
        actor.on(protocol.Room, self.room)
        actor.on(protocol.Free, self.free)
        actor.on(protocol.Committed, self.committed)
        actor.on(protocol.Touch, self.touch)
        actor.on_up(self.peer_up)
        actor.on_down(self.peer_down)
        actor.on_reconfigured(self.reconfigured)

    async def serve(self, _actor: Actor) -> dict[str, Any]:
        """Open the store; what is told to all peers."""
        await self.in_thread(self._open)
        arena = ""
        if isinstance(self.store, MemoryStore):
            path = self.actor.runtime_dir / f"{self.actor.id}.arena"
            self.store.arena.serve(path, self.actor.incarnation)
            arena = str(path)
        if self.store.note:
            self.actor.log.warning("tier.limited", note=self.store.note)
        self.actor.every(FLUSH_S, self.flush_soon)
        self.actor.every(self.options.sweep_s, self.sweep_soon)
        return {"kind": str(self.options.kind), "name": self.options.name, "root": self.options.root, "arena": arena}

    async def drain(self, _actor: Actor) -> None:
        """Write what waits, and leave nothing in the runtime directory."""
        self._draining = True  # no timer begins anything new
        await self.in_thread(lambda: self.store.flush())
        self._closed = True
        self.thread.shutdown(cancel_futures=True)
        self.store.close()

    # --- messages of the index

    async def room(self, message: protocol.Room, _request: Request) -> protocol.Roomed:
        """Delete, then promise places."""
        if len(message.names) != len(message.sizes):
            raise InvalidArgument(f"room for {len(message.names)} names and {len(message.sizes)} sizes")
        owner = Owner(message.owner, message.owner_incarnation)
        wants = [Want(key, size_bytes) for key, size_bytes in zip(message.names, message.sizes, strict=True)]
        return await self.in_thread(lambda: self.store.room(owner, message.deletes, wants, give_back=message.give_back))

    async def free(self, message: protocol.Free, _request: Request) -> None:
        """Places were given up."""
        living = frozenset(Owner(peer.id, peer.incarnation) for peer in self.actor.peers.values())
        await self._tell(await self.in_thread(lambda: self.store.free(message.locations, living)))

    async def committed(self, message: protocol.Committed, _request: Request) -> None:
        """A place is a row now."""
        await self._tell(await self.in_thread(lambda: self.store.committed(message.location)))

    async def touch(self, message: protocol.Touch, _request: Request) -> None:
        """Keep recency, hits, marks and pin."""
        await self.in_thread(lambda: self.store.touch(message))

    # --- others come and go

    def peer_up(self, peer: Peer) -> None:
        """A new index hears everything; of others we keep the process id, which is in the names of their leftovers."""
        if peer.id == "index":
            if self._replay is not None:
                self._replay.cancel()
            self._replay = self.actor.spawn(self.replay(peer))
        else:
            self._pids[peer.id, peer.incarnation] = peer.pid

    def peer_down(self, down: protocol.Down) -> None:
        """What the dead one held stays until the index says so, or until there is a new index."""
        pid = self._pids.pop((down.id, down.incarnation), None)
        owner = Owner(down.id, down.incarnation)
        self.actor.spawn(self._owner_died(owner))
        if pid is not None and down.id.startswith("writer:"):
            self.dead_pids |= {pid}
            self.sweep_soon()

    async def _owner_died(self, owner: Owner) -> None:
        await self._tell(await self.in_thread(lambda: self.store.owner_died(owner)))

    async def replay(self, index: Peer) -> None:
        """Tell a new index all rows and all places that are being written, again and again until it took them."""
        await self.in_thread(lambda: self.store.hand_over(time.monotonic()))
        while not await self._replay_once(index):
            if self.actor.peers.get("index") is not index:
                return  # it died: the next one hears everything
            await asyncio.sleep(REPLAY_PAUSE_S)

    async def _replay_once(self, index: Peer) -> bool:
        await self.in_thread(lambda: self.store.flush())  # rows are read with their trailers
        places = await self.in_thread(lambda: self.store.places())
        leases = [(one.owner.id, one.owner.incarnation, one.location) for one in self.store.leases]
        try:
            for start in range(0, len(places), REPLAY_ROWS):
                scan = await self.in_thread(partial(self.store.read, places[start : start + REPLAY_ROWS]))
                self._report_lost(scan)
                for rows in limited(scan.rows, REPLAY_BYTES):
                    await self._send_replay(index, rows, leases, last=False)
                    leases = []
            await self._send_replay(index, [], leases, last=True)
        except BarrelError as error:
            self.actor.log.warning("replay.failed", code=error.code, reason=str(error))
            return False
        return True

    async def _send_replay(
        self, index: Peer, rows: Sequence[StoredRow], leases: list[tuple[str, int, protocol.Location]], *, last: bool
    ) -> None:
        message = protocol.Replay(
            server=self.actor.id, incarnation=self.actor.incarnation, kind=self.options.kind,
            quota_bytes=self.store.quota_bytes, rows=list(rows), leases=leases, last=last, note=self.store.note,
        )  # fmt: skip
        await index.call(message, protocol.Ok, deadline_s=INDEX_DEADLINE_S)

    # --- the quota

    def reconfigured(self) -> None:
        """Take up a quota that has changed."""
        if self._wanted_bytes != self._configured_bytes():
            self._wanted_bytes = self._configured_bytes()
            self.actor.spawn(self._requota())

    def _configured_bytes(self) -> int:
        return int(self.actor.boot.settings["tiers"][self.options.name]["quota_bytes"])

    async def _requota(self) -> None:
        """Nothing more is promised above it from now on; the index evicts what is stored above it."""
        await self.in_thread(lambda: self.store.set_quota(self._wanted_bytes))
        self.actor.log.info("tier.quota", quota_bytes=self.store.quota_bytes, note=self.store.note)
        index = self.actor.peers.get("index")
        if index is None:
            return  # the next one hears it in the replay
        message = protocol.Quota(
            server=self.actor.id, incarnation=self.actor.incarnation, quota_bytes=self.store.quota_bytes,
            note=self.store.note,
        )  # fmt: skip
        try:
            await index.call(message, protocol.Ok, deadline_s=INDEX_DEADLINE_S)
        except BarrelError as error:
            self.actor.log.warning("quota.failed", code=error.code, reason=str(error))

    # --- looking around

    def flush_soon(self) -> None:
        """Write the trailers that wait."""
        if not self._draining:
            self.actor.spawn(self.in_thread(lambda: self.store.flush()))

    def sweep_soon(self) -> None:
        """Compare with the medium, unless that is under way."""
        if not self._sweeping and not self._draining:
            self._sweeping = True
            self.actor.spawn(self._sweep())

    async def _sweep(self) -> None:
        dead_pids, self.dead_pids = self.dead_pids, frozenset()
        live_pids = frozenset(self._pids.values()) - dead_pids
        scan = await self.in_thread(lambda: self.store.sweep(time.time(), dead_pids, live_pids))
        self._sweeping = False
        await self._tell(scan)
        await self._tell(await self.in_thread(lambda: self.store.expire(time.monotonic())))
        if self.dead_pids:  # one died while we looked
            self.sweep_soon()

    async def _tell(self, scan: Scan) -> None:
        """Report what a look at the bytes found. A row that the index does not want has no use and goes."""
        self._report_lost(scan)
        for row in scan.rows:
            index = self.actor.peers.get("index")
            if index is None:
                return  # the next one hears of it in the replay
            try:
                await index.call(protocol.Adopt(row=row), protocol.Ok, deadline_s=INDEX_DEADLINE_S)
            except BarrelError as error:
                self.actor.log.info("row.not_adopted", code=error.code)
                if not error.retryable:
                    await self.in_thread(partial(self.store.delete, row.location))

    def _report_lost(self, scan: Scan) -> None:
        for keys, corrupt in ((scan.gone, False), (scan.corrupt, True)):
            if keys:
                self.actor.log.warning("rows.lost", rows=len(keys), corrupt=corrupt)
                self.actor.cast("index", protocol.Lost(server=self.actor.id, keys=list(keys), corrupt=corrupt))

    async def in_thread(self, job: Callable[[], T]) -> T:
        """Run a job of the store, after those that came before."""
        if self._closed:
            raise asyncio.CancelledError  # the process is on its way out, and whatever still runs ends here
        return await self.actor.loop.run_in_executor(self.thread, job)

    def _open(self) -> None:
        """In the store's thread, so that jobs of messages that come early find the store open."""
        options, actor, quota_bytes = self.options, self.actor, self._wanted_bytes
        if options.kind is Tier.RAM:
            self.store = MemoryStore(actor.id, actor.incarnation, quota_bytes, free_memory_bytes)
            return
        takes_memory = free_memory_bytes if options.kind is Tier.RAM_FILE else None
        root = Path(options.root)
        self.store = FileStore(options.kind, actor.id, actor.incarnation, quota_bytes, root, takes_memory)


def limited(rows: Sequence[StoredRow], limit_bytes: int) -> Iterator[list[StoredRow]]:
    """The rows in order, in lists whose texts and tokens stay below the limit (one row may exceed it alone)."""
    batch: list[StoredRow] = []
    batch_bytes = 0
    for row in rows:
        row_bytes = len(row.text) + len(row.token_ids) + len(row.token_bytes)
        if batch and batch_bytes + row_bytes > limit_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(row)
        batch_bytes += row_bytes
    if batch:
        yield batch


def main() -> int:
    """The process's life; its exit status."""
    made: list[TierProcess] = []

    def make(actor: Actor) -> Callable[[Actor], Any]:
        made.append(TierProcess(actor))
        return made[0].serve

    return actors.run(make, drain=lambda actor: made[0].drain(actor))


if __name__ == "__main__":
    sys.exit(main())
