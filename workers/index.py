"""The cache index: the one process that decides what is stored, found, protected and evicted.

Run as `python -P -m barrel_inference.workers.index index`. Restart: always. While it is down, prompts are computed cold and
nothing is saved; models keep running. After a restart the tiers tell it what they hold.

Decisions are the catalog's (pure, tiers/catalog.py). This file answers; index_room.py finds room for saves, index_errands.py
carries decisions to the tiers, index_rows.py says how rows look from outside.

A save counts once, when its last node is published; a mark that is a new row counts too.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from barrel_inference import protocol
from barrel_inference.actor import Actor, Request, run
from barrel_inference.errors import InvalidArgument, NotFound
from barrel_inference.protocol import Location, Tier
from barrel_inference.tiers.catalog import Catalog
from barrel_inference.tiers.prefix_tree import Mark
from barrel_inference.tiers.reservations import Reservation
from barrel_inference.tiers.stored import Changes
from barrel_inference.workers import index_rows
from barrel_inference.workers.index_errands import Errands
from barrel_inference.workers.index_room import Rooms

REBUILD_WAIT_S = 0.2  # a lookup waits that long for the tiers' replay
# After so long, nobody waits any more for a tier that has not reported: it may have failed for good.
REBUILD_S = 15.0
PUBLISH_DEADLINE_S = 3.0  # for a tier to report what was published under an older index
TOUCH_S = 2.0
DRAIN_S = 1.0  # for a tier to take the last of it
# A row that was found before its parent: the parent may still be on its way.
ORPHAN_S = 10.0
# After a model's death an image may still be on its way to a writer, which can finish it from its own mapping.
HAND_OVER_S = 1.0
# No save takes so long; who was promised the room has forgotten it.
RESERVATION_S = 300.0
EXPIRE_EVERY_S = 15.0

COUNTERS = (
    "hits_exact", "hits_resume", "hits_longest_prefix", "hits_sticky", "hits_sticky_partial", "hits_continuation",
    "hits_live", "misses", "saves_cold", "saves_continued", "saves_finish", "saves_evict", "saves_shutdown",
    "saves_agent_prefix", "saves_dropped", "duplicate_dropped", "evictions", "corrupt_files", "tokens_reused",
    "tokens_prefilled", "bytes_ram", "bytes_ram_file", "bytes_disk", "bytes_written_disk", "pack_total_ns",
    "load_total_ns", "longest_prefix_probes", "longest_prefix_ns", "restarts", "messages_rejected",
)  # fmt: skip


class IndexProcess:
    """The index's messages."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        # The upper half of a token says which index gave it.
        self._epoch = actor.incarnation % 2**31
        self.catalog = Catalog(first_token=self._epoch << 32)
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.errands = Errands(actor, self.catalog, self.counters)
        self.rooms = Rooms(actor, self.catalog, self.counters, self.errands)
        self._tiers: dict[str, Any] = actor.boot.settings.get("tiers", {})
        self._expected = {f"tier:{name}" for name, tier in self._tiers.items() if tier.get("enabled", True)}
        self._replayed = asyncio.Event()
        self._landed: dict[tuple[str, int, str], asyncio.Event] = {}  # by the place that somebody waits for
        self._touch_soon = False
        on = actor.on
        on(protocol.Lookup, self.lookup)
        on(protocol.CheckIn, self.check_in)
        on(protocol.SavePlan, self.save_plan)
        on(protocol.Reserve, self.reserve)
        on(protocol.Handed, self.handed)
        on(protocol.CheckReservation, self.check_reservation)
        on(protocol.Publish, self.publish)
        on(protocol.Abort, self.abort)
        on(protocol.AddMark, self.add_mark)
        on(protocol.Counted, self.counted)
        on(protocol.Counters, lambda _message, _request: protocol.CounterValues(counters=self.values()))
        on(protocol.Dump, self.dump)
        on(protocol.CacheStats, self.stats)
        on(protocol.Evict, self.evict)
        on(protocol.Replay, self.replay)
        on(protocol.Quota, self.quota)
        on(protocol.Adopt, self.adopt)
        on(protocol.Lost, self.lost)
        actor.on_down(self.peer_down)

    async def start(self, actor: Actor) -> dict[str, Any]:
        """Serve at once; the tiers report as they come up."""
        self._waits_until_s = time.monotonic() + REBUILD_S
        actor.every(TOUCH_S, self.touch)
        actor.every(EXPIRE_EVERY_S, self._expire)
        if not self._expected:
            self._replayed.set()
        return {}

    # --- lookup

    async def lookup(self, message: protocol.Lookup, _request: Request) -> protocol.Match:
        """The longest stored prefix, claimed for the model that asks."""
        if not self._replayed.is_set() and time.monotonic() < self._waits_until_s:
            await _within(self._replayed.wait(), REBUILD_WAIT_S)
        parent_key = message.parent_key
        coming = self.catalog.reservations.by_key.get(parent_key) if parent_key is not None else None
        if coming is not None and message.wait_ms and coming.end_tokens > message.live_tokens:
            await _within(self.errands.settled(coming.node.key).wait(), message.wait_ms / 1000)
        began_ns = time.perf_counter_ns()
        found = self.catalog.lookup(message.namespace, message.text, parent_key)
        self.counters["longest_prefix_probes"] += found.via != "exact"
        self.counters["longest_prefix_ns"] += time.perf_counter_ns() - began_ns
        claim = 0
        if found.steps and (owner := self._owner(message.model_id)) is not None:
            claim = self.catalog.claim(*owner, found.steps)
        miss = found.miss_reason
        if miss is not None and not self._replayed.is_set():
            miss = "index_rebuilding"
        return protocol.Match(
            claim=claim, nodes=self.catalog.wire_nodes(found), via=found.via, miss_reason=miss,
            divergence_byte=found.divergence_byte, parent_tokens=found.parent_tokens,
        )  # fmt: skip

    def _owner(self, model_id: str) -> tuple[str, int] | None:
        peer = self.actor.peers.get(f"model:{model_id}")
        return (peer.id, peer.incarnation) if peer is not None else None

    def check_in(self, message: protocol.CheckIn, _request: Request) -> None:
        """A restore is over."""
        now_s = time.time()
        self.catalog.release(message.claim)
        for key in message.used_keys:
            self.catalog.used(key, now_s)
        for key, server in message.corrupt:
            changes = self.catalog.lose(server, key)
            self.counters["corrupt_files"] += bool(changes.deletes)
            self.errands.carry_out(changes)

    # --- saves

    def save_plan(self, message: protocol.SavePlan, _request: Request) -> protocol.Planned:
        """What of a sequence is stored already."""
        chain, beyond = self.catalog.plan(message.namespace, message.token_ids, message.text, message.server)
        now_s = time.time()
        for planned in chain:  # a save that finds them is a use: the conversation goes on
            self.catalog.refresh(planned.key, now_s)
        return protocol.Planned(
            nodes=[(planned.key, planned.end_tokens, list(planned.servers)) for planned in chain],
            inside_key=beyond.key if beyond is not None else None,
        )

    async def reserve(self, message: protocol.Reserve, request: Request) -> protocol.Grants:
        """Places for nodes, root first."""
        return await self.rooms.reserve(message, request, self._owner(message.model_id))

    def handed(self, message: protocol.Handed, _request: Request) -> None:
        """A writer has an image."""
        reservation = self.catalog.reservations.by_token.get(message.token)
        writer = self.actor.peers.get(message.writer)
        if reservation is not None and writer is not None:
            owner_is_up = self._is_up((reservation.owner, reservation.owner_incarnation))
            self.catalog.handed(message.token, (writer.id, writer.incarnation), owner_is_up=owner_is_up)

    def check_reservation(self, message: protocol.CheckReservation, _request: Request) -> protocol.Ok:
        """Is a writer's token still good?"""
        if message.token >> 32 == self._epoch and message.token not in self.catalog.reservations.by_token:
            raise NotFound(f"no reservation {message.token}")
        return protocol.Ok()

    async def publish(self, message: protocol.Publish, _request: Request) -> protocol.Ok:
        """A node is complete."""
        reservation = self.catalog.reservations.by_token.get(message.token)
        if reservation is None and message.token >> 32 != self._epoch:
            return await self._publish_unknown(message)
        if reservation is None:  # given up, its place may be somebody else's by now
            raise NotFound(f"no reservation {message.token}")
        changes = self.catalog.publish(reservation, message.location, time.time())
        for reason in changes.saved:
            self.counters[f"saves_{reason.value}"] += 1
        self.counters["duplicate_dropped"] += message.adopted
        self.errands.carry_out(changes)
        if message.location in changes.frees:
            raise NotFound("what this node goes on from is not stored any more")
        return protocol.Ok()

    async def _publish_unknown(self, message: protocol.Publish) -> protocol.Ok:
        """Promised by an index that has died since: the tier looks, and reports what is there."""
        where = message.location
        place = (where.server, where.offset, where.name)
        landed = self._landed.setdefault(place, asyncio.Event())
        self.actor.cast(where.server, protocol.Committed(location=where))
        await _within(landed.wait(), PUBLISH_DEADLINE_S)
        self._landed.pop(place, None)
        if not landed.is_set():
            self.actor.cast(where.server, protocol.Free(locations=[where]))
            raise NotFound(f"no reservation {message.token}")
        return protocol.Ok()

    def abort(self, message: protocol.Abort, _request: Request) -> None:
        """Promises are given back. Who drops a save counts it; one that failed is counted here."""
        changes = Changes()
        for token in message.tokens:
            is_open = token in self.catalog.reservations.by_token
            self.counters["saves_dropped"] += is_open and message.reason == "failed"
            changes.add(self.catalog.abort(token))
        self.errands.carry_out(changes)

    def add_mark(self, message: protocol.AddMark, _request: Request) -> protocol.Ok:
        """Name a point of a stored node."""
        mark = Mark(message.key, message.tokens, message.reason, message.pinned)
        is_new = self.catalog.add_mark(message.node_key, mark)
        if is_new is None:
            raise NotFound("the mark names no point of a stored node")
        self.counters[f"saves_{message.reason.value}"] += is_new
        self._touch_shortly()
        return protocol.Ok()

    # --- eviction

    async def evict(self, message: protocol.Evict, _request: Request) -> protocol.Evicted:
        """Free bytes now, and give memory back to the system."""
        changes = self.catalog.evict(self._servers(message.tiers), message.bytes, time.time())
        # What the tiers say, not what the rows had: nothing can be deleted where nothing can be written.
        freed_bytes = [await deletion for deletion in self.errands.carry_out(changes, give_back=True)]
        return protocol.Evicted(rows=changes.evicted, bytes=sum(freed_bytes))

    def _servers(self, tiers: Iterable[str] | None) -> list[str]:
        """The servers that are up of these tiers, each named by its kind or its id; None = all."""
        accounts = self.catalog.stored.accounts.values()
        if tiers is None:
            return [account.server for account in accounts]
        named = set(tiers)
        known = {tier.value for tier in Tier} | {f"tier:{name}" for name in self._tiers}
        if unknown := named - known:
            raise InvalidArgument(
                f"no tier is called {', '.join(sorted(unknown))}", hint=f"use {', '.join(sorted(known))}"
            )
        return [account.server for account in accounts if not named.isdisjoint((account.server, account.kind.value))]

    # --- tiers and deaths

    async def replay(self, message: protocol.Replay, _request: Request) -> protocol.Ok:
        """A tier reports what it holds."""
        catalog, changes, now_s = self.catalog, Changes(), time.time()
        account = catalog.stored.accounts.get(message.server)
        if account is None or account.incarnation != message.incarnation:
            changes.add(catalog.close_tier(message.server))
            catalog.stored.open_tier(
                message.server, message.kind, message.quota_bytes, message.incarnation, message.note
            )
        for row in message.rows:
            changes.add(catalog.restore_row(row, now_s))
            self._land(row.location)
        self._release_leases(message)
        if message.last:
            catalog.stored.accounts[message.server].replayed = True
            if self._expected <= {one.server for one in catalog.stored.accounts.values() if one.replayed}:
                self._replayed.set()
                changes.add(catalog.stored.drop_orphans())
            changes.add(catalog.make_room(message.server, 0, now_s)[1])
        for deletion in self.errands.carry_out(changes):
            await deletion
        return protocol.Ok()

    async def quota(self, message: protocol.Quota, _request: Request) -> protocol.Ok:
        """A tier has another quota: what it holds above a smaller one goes, the least valuable first."""
        account = self.catalog.stored.accounts.get(message.server)
        if account is None or account.incarnation != message.incarnation:
            return protocol.Ok()  # its replay, which is still to come, says it
        account.quota_bytes, account.note = message.quota_bytes, message.note
        _fits, changes = self.catalog.make_room(message.server, 0, time.time())
        for deletion in self.errands.carry_out(changes, give_back=True):
            await deletion
        return protocol.Ok()

    def _release_leases(self, message: protocol.Replay) -> None:
        """Places that a dead process was writing are free again; those of the living are found when they publish."""
        for owner, incarnation, location in message.leases:
            peer = self.actor.peers.get(owner)
            if peer is None or peer.incarnation != incarnation:
                self.actor.cast(message.server, protocol.Free(locations=[location]))

    def _land(self, location: Location) -> None:
        landed = self._landed.get((location.server, location.offset, location.name))
        if landed is not None:
            landed.set()

    async def adopt(self, message: protocol.Adopt, _request: Request) -> protocol.Ok:
        """A complete image that no reservation led to."""
        location = message.row.location
        changes = self.catalog.restore_row(message.row, time.time())
        if location.server in self.catalog.stored.accounts:  # nobody had reserved its bytes
            changes.add(self.catalog.make_room(location.server, 0, time.time())[1])
        is_refused = location in changes.deletes.get(location.server, [])
        if is_refused:
            changes.deletes[location.server].remove(location)  # the tier deletes it when it hears no
        else:
            self._land(location)
            if message.row.parent_key in self.catalog.stored.orphans:
                self.actor.loop.call_later(ORPHAN_S, self._drop_orphans)
        for deletion in self.errands.carry_out(changes):
            await deletion
        if is_refused:
            raise NotFound("the row belongs to nothing that is stored")
        return protocol.Ok()

    def _drop_orphans(self) -> None:
        if self._replayed.is_set():
            self.errands.carry_out(self.catalog.stored.drop_orphans())

    def lost(self, message: protocol.Lost, _request: Request) -> None:
        """Copies are gone or unreadable."""
        for key in message.keys:
            self.counters["corrupt_files"] += message.corrupt
            self.errands.carry_out(self.catalog.lose(message.server, key))

    def peer_down(self, down: protocol.Down) -> None:
        """Release what a dead incarnation held."""
        account = self.catalog.stored.accounts.get(down.id)
        if account is not None and account.incarnation == down.incarnation:
            self.errands.carry_out(self.catalog.close_tier(down.id))
            return
        left = self.catalog.release_owner(down.id, down.incarnation)
        on_their_way = []
        for reservation in left:
            if reservation.writer is not None and self._is_up(reservation.writer):
                self.catalog.handed(reservation.token, reservation.writer, owner_is_up=False)
            elif reservation.location is not None and reservation.location.name and down.id.startswith("model:"):
                on_their_way.append(reservation)
            else:
                self.errands.abort([reservation])
        if on_their_way:
            self.actor.loop.call_later(HAND_OVER_S, self._give_up, on_their_way, (down.id, down.incarnation))

    def _give_up(self, reservations: list[Reservation], owner: tuple[str, int]) -> None:
        """Nobody was handed what a dead model had begun to save."""
        self.errands.abort(r for r in reservations if (r.owner, r.owner_incarnation) == owner)

    def _is_up(self, process: tuple[str, int]) -> bool:
        peer = self.actor.peers.get(process[0])
        return peer is not None and peer.incarnation == process[1]

    def _expire(self) -> None:
        self.errands.abort(self.catalog.expired(time.monotonic() - RESERVATION_S))

    def _touch_shortly(self) -> None:
        """Marks and pins are somebody's order, unlike recency: they do not wait for the next round."""
        if not self._touch_soon:
            self._touch_soon = True
            self.actor.loop.call_later(0.1, self.touch)

    def touch(self) -> None:
        """Tell the tiers about recency, hits, marks and pins that have moved."""
        self._touch_soon = False
        stored = self.catalog.stored
        touched, stored.touched = stored.touched, set()
        for key in touched:
            node = stored.nodes.get(key)
            for location in node.copies.values() if node is not None else ():
                assert node is not None
                if not self.actor.cast(location.server, index_rows.touch_of(node, location)):
                    stored.touched.add(key)  # it reads nothing at the moment: next time

    async def drain(self, _actor: Actor) -> None:
        """Nothing may be forgotten at a stop: what was told to the tiers has arrived when each answers what came after it."""
        self.touch()
        empty = protocol.Room(
            owner=self.actor.id, owner_incarnation=self.actor.incarnation, deletes=[], names=[], sizes=[]
        )
        tiers = [self.actor.peers[server] for server in self.catalog.stored.accounts if server in self.actor.peers]
        await asyncio.gather(
            *(tier.call(empty, protocol.Roomed, deadline_s=DRAIN_S) for tier in tiers), return_exceptions=True
        )

    # --- views

    def counted(self, message: protocol.Counted, _request: Request) -> None:
        """Add to the counters; only known names, so that no peer can fill memory."""
        for name, delta in message.deltas.items():
            if name in COUNTERS:
                self.counters[name] += delta

    def values(self) -> dict[str, int]:
        """Every counter; byte gauges from the accounts."""
        by_kind = dict.fromkeys(Tier, 0)
        for account in self.catalog.stored.accounts.values():
            by_kind[account.kind] += account.stored_bytes
        return dict(self.counters) | {f"bytes_{kind.value}": count for kind, count in by_kind.items()}

    def dump(self, message: protocol.Dump, _request: Request) -> protocol.DumpRows:
        """The rows, last use first, then those that are being written."""
        accounts = self.catalog.stored.accounts
        kinds = {server: accounts[server].kind for server in self._servers([message.tier] if message.tier else None)}
        rows: list[protocol.DumpRow] = []
        words_of: dict[bytes, str] = {}
        # With a tier named, its rows may all lie behind those of others.
        for node in self.catalog.latest(0 if message.tier else message.limit):
            rows += index_rows.rows_of(node, kinds, time.time(), words_of)
        for reservation in self.catalog.reservations.by_token.values():
            if reservation.server in kinds:
                text_bytes = self.catalog.text_end(reservation)
                rows.append(index_rows.writing_row(reservation, kinds[reservation.server], text_bytes))
        return protocol.DumpRows(rows=rows[: message.limit] if message.limit else rows)

    def stats(self, _message: protocol.CacheStats, _request: Request) -> protocol.CacheStatsReply:
        """The tiers' accounts; of a tier that is down, that it is."""
        stored = self.catalog.stored
        tiers = [
            protocol.TierStats(
                server=a.server, kind=a.kind.value, quota_bytes=a.quota_bytes, stored_bytes=a.stored_bytes,
                reserved_bytes=a.reserved_bytes, rows=a.rows, up=a.server in self.actor.peers, note=a.note,
            )
            for a in stored.accounts.values()
        ]  # fmt: skip
        for server in sorted(self._expected - stored.accounts.keys()):
            tier = self._tiers[server.removeprefix("tier:")]
            is_up = server in self.actor.peers
            tiers.append(
                protocol.TierStats(
                    server=server, kind=tier.get("kind", server.removeprefix("tier:")),
                    quota_bytes=tier["quota_bytes"], stored_bytes=0, reserved_bytes=0, rows=0, up=is_up,
                    note="has not reported its rows yet" if is_up else "is not running",
                )
            )  # fmt: skip
        return protocol.CacheStatsReply(
            tiers=tiers, namespaces=len(stored.trees), nodes=len(stored.nodes), marks=len(stored.marks)
        )


async def _within(what: Awaitable[object], timeout_s: float) -> None:
    """Wait, but no longer than that."""
    try:
        await asyncio.wait_for(what, timeout_s)
    except TimeoutError:
        return


def main() -> int:
    """The process's life; returns its exit status."""
    made: list[IndexProcess] = []

    def make(actor: Actor) -> Callable[[Actor], Awaitable[dict[str, Any] | None]]:
        made.append(IndexProcess(actor))
        return made[0].start

    return run(make, drain=lambda actor: made[0].drain(actor))


if __name__ == "__main__":
    sys.exit(main())
