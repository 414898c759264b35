"""The cache index: the one process that decides what is stored, found, protected and evicted.

Run as `python -P -m barrel_inference.workers.index index`. Restart: always. While it is down, prompts are computed cold and
nothing is saved; models keep running. After a restart the tiers tell it what they hold.

Decisions are the catalog's (pure); this file carries them to the tiers and answers.

Order matters: a deletion is sent in the same turn of the loop in which it was decided, and each tier does what it is told in
that order. So a place that was given up is empty before anybody is promised it again.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from barrel_inference import protocol
from barrel_inference.actor import Actor, Request, run
from barrel_inference.errors import BarrelError, NotFound, ProtocolError
from barrel_inference.protocol import Location, NewNode, Tier
from barrel_inference.tiers.catalog import Catalog
from barrel_inference.tiers.prefix_tree import Mark
from barrel_inference.tiers.reservations import Reservation
from barrel_inference.tiers.stored import Changes
from barrel_inference.workers import index_rows

REBUILD_WAIT_S = 0.2  # a lookup waits that long for the tiers' replay
# After so long, nobody waits any more for a tier that has not reported: it may have failed for good.
REBUILD_S = 15.0
ROOM_DEADLINE_S = 8.0  # below the deadline of those who reserve: they hear no, and not nothing
PUBLISH_DEADLINE_S = 3.0  # for a tier to report what was published under an older index
TOUCH_S = 2.0
DRAIN_S = 1.0  # for a tier to take the last of it
# A row that was found before its parent: the parent may still be on its way.
ORPHAN_S = 10.0
# After a model's death its writer may still be finishing from its own mapping.
LATE_WRITE_S = 10.0
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
        self._expected = {
            f"tier:{name}" for name, tier in actor.boot.settings.get("tiers", {}).items() if tier.get("enabled", True)
        }
        self._replayed = asyncio.Event()
        self._settled: dict[bytes, asyncio.Event] = {}  # by the key that somebody waits for
        self._landed: dict[tuple[str, int, str], asyncio.Event] = {}  # by the place that somebody waits for
        self._touch_soon = False
        on = actor.on
        on(protocol.Lookup, self.lookup)
        on(protocol.CheckIn, self.check_in)
        on(protocol.SavePlan, self.save_plan)
        on(protocol.Reserve, self.reserve)
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
        if parent_key is not None and message.wait_ms and parent_key in self.catalog.reservations.by_key:
            await _within(self._settled.setdefault(parent_key, asyncio.Event()).wait(), message.wait_ms / 1000)
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
            self._carry_out(changes)

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
        """Places for nodes, root first; what does not fit is left off at the end."""
        owner = self._owner(message.model_id)
        if (
            owner is None
            or message.server not in self.actor.peers
            or message.server not in self.catalog.stored.accounts
        ):
            grants = [protocol.Grant(status="tier_down") for _ in message.nodes]
        else:
            statuses, made, changes = self._promise(message, owner)
            wanted = [reservation for reservation in made if reservation is not None]
            deletes = changes.deletes.pop(message.server, [])
            self._carry_out(changes)
            placed = await self._place(message.server, owner, wanted, deletes)
            if request.deadline_s is not None and time.monotonic() > request.deadline_s:
                self._abort(wanted)  # nobody hears the answer
            grants = [
                self._grant(status, reservation, placed) for status, reservation in zip(statuses, made, strict=True)
            ]
        self.counters["duplicate_dropped"] += sum(grant.status in ("already_present", "conflict") for grant in grants)
        self.counters["saves_dropped"] += any(
            grant.status not in ("granted", "already_present", "conflict") for grant in grants
        )
        return protocol.Grants(grants=grants)

    def _promise(
        self, message: protocol.Reserve, owner: tuple[str, int]
    ) -> tuple[list[str], list[Reservation | None], Changes]:
        """Judge each node and reserve its bytes; collects what has to be deleted for them."""
        all_changes = Changes()
        statuses: list[str] = []
        made: list[Reservation | None] = []
        last = len(message.nodes) - 1
        for number, node in enumerate(message.nodes):
            status, reservation = self._promise_one(message, node, owner, number == last, all_changes)
            statuses.append(status)
            made.append(reservation)
        return statuses, made, all_changes

    def _promise_one(
        self, message: protocol.Reserve, node: NewNode, owner: tuple[str, int], is_last: bool, all_changes: Changes
    ) -> tuple[str, Reservation | None]:
        catalog = self.catalog
        status, digest = catalog.judge(message.namespace, node, message.server)
        if digest is None:
            return status, None
        spare = frozenset() if node.parent_key is None else frozenset({node.parent_key})
        fits, changes = catalog.make_room(message.server, node.size_bytes, time.time(), spare)
        all_changes.add(changes)
        if not fits:
            return "no_space", None
        reservation = Reservation(
            catalog.reservations.new_token(), message.namespace, message.model_id, node, message.server, *owner,
            is_last=is_last, digest=digest, made_s=time.monotonic(),
        )  # fmt: skip
        catalog.reserve(reservation)
        return status, reservation

    async def _place(
        self, server: str, owner: tuple[str, int], wanted: list[Reservation], deletes: list[Location]
    ) -> dict[int, Location | None]:
        """Have the tier delete and allocate: the place by token, None where there is no room; nothing at all = it is down.

        A tier that takes too long is not waited for; what it promises after all is given back.
        """
        if not wanted and not deletes:
            return {}
        room = self.actor.spawn(self._room(server, owner, wanted, deletes))
        done, _ = await asyncio.wait({room}, timeout=ROOM_DEADLINE_S)
        if not done or room.result() is None:
            self._abort(wanted)
            return {}
        places: dict[int, Location | None] = room.result()
        return places

    async def _room(
        self, server: str, owner: tuple[str, int], wanted: list[Reservation], deletes: list[Location]
    ) -> dict[int, Location | None] | None:
        room = protocol.Room(
            owner=owner[0], owner_incarnation=owner[1], deletes=deletes,
            names=[r.node.key for r in wanted], sizes=[r.node.size_bytes for r in wanted],
        )  # fmt: skip
        try:
            reply = await self.actor.peer(server).call(room, protocol.Roomed)
        except BarrelError as error:
            self.actor.log.warning("room.failed", server=server, code=error.code)
            return None
        changes = Changes()
        for reservation, location in zip(wanted, reply.locations, strict=True):
            if reservation.token in self.catalog.reservations.by_token:
                reservation.location = location
                if location is None:
                    changes.add(self.catalog.abort(reservation.token))
            elif location is not None:  # its owner died, or was told no, while the tier was busy
                changes.frees.append(location)
        self._carry_out(changes)
        return {r.token: location for r, location in zip(wanted, reply.locations, strict=True)}

    def _grant(
        self, status: str, reservation: Reservation | None, placed: dict[int, Location | None]
    ) -> protocol.Grant:
        if reservation is None:
            return protocol.Grant(status=status)
        if reservation.token not in placed:
            return protocol.Grant(status="tier_down")
        location = placed[reservation.token]
        if location is None or reservation.token not in self.catalog.reservations.by_token:
            return protocol.Grant(status="no_space")
        return protocol.Grant(status=status, token=reservation.token, location=location)

    def _abort(self, reservations: Iterable[Reservation]) -> None:
        changes = Changes()
        for reservation in reservations:
            changes.add(self.catalog.abort(reservation.token))
        self._carry_out(changes)

    def check_reservation(self, message: protocol.CheckReservation, _request: Request) -> protocol.Ok:
        """Is a writer's token still good?"""
        if message.token not in self.catalog.reservations.by_token:
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
        self._carry_out(changes)
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
        self._carry_out(changes)

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
        if message.server is not None:
            servers = [message.server]
        else:
            kinds = set(message.tiers) if message.tiers is not None else {tier.value for tier in Tier}
            if unknown := kinds - {tier.value for tier in Tier}:
                raise ProtocolError(f"tiers: {sorted(unknown)} are no tiers", hint="use ram, ram_file, disk")
            servers = [one.server for one in self.catalog.stored.accounts.values() if one.kind.value in kinds]
        changes = self.catalog.evict(servers, message.bytes, time.time())
        evicted = protocol.Evicted(rows=changes.evicted, bytes=changes.dropped_bytes)
        for deletion in self._carry_out(changes, give_back=True):
            await deletion
        return evicted

    def _carry_out(self, changes: Changes, *, give_back: bool = False) -> "list[asyncio.Task[None]]":
        """Tell tiers and waiters what has changed; the tasks end when the tiers have deleted."""
        self.counters["evictions"] += changes.evicted
        for location in changes.committed:
            self.actor.cast(location.server, protocol.Committed(location=location))
        for location in changes.frees:
            self.actor.cast(location.server, protocol.Free(locations=[location]))
        for key in changes.settled:
            if (event := self._settled.pop(key, None)) is not None:
                event.set()
        return [
            self.actor.spawn(self._delete(server, locations, give_back))
            for server, locations in changes.deletes.items()
        ]

    async def _delete(self, server: str, locations: list[Location], give_back: bool) -> None:
        peer = self.actor.peers.get(server)
        if peer is None:
            return  # its bytes are gone with it, or it reports them again
        room = protocol.Room(
            owner=self.actor.id, owner_incarnation=self.actor.incarnation, deletes=locations, names=[], sizes=[],
            give_back=give_back,
        )  # fmt: skip
        try:
            await peer.call(room, protocol.Roomed)
        except BarrelError as error:
            self.actor.log.warning("delete.failed", server=server, code=error.code)

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
        for deletion in self._carry_out(changes):
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
        is_refused = location in changes.deletes.get(location.server, [])
        if is_refused:
            changes.deletes[location.server].remove(location)  # the tier deletes it when it hears no
        else:
            self._land(location)
            if message.row.parent_key in self.catalog.stored.orphans:
                self.actor.loop.call_later(ORPHAN_S, self._drop_orphans)
        for deletion in self._carry_out(changes):
            await deletion
        if is_refused:
            raise NotFound("the row belongs to nothing that is stored")
        return protocol.Ok()

    def _drop_orphans(self) -> None:
        if self._replayed.is_set():
            self._carry_out(self.catalog.stored.drop_orphans())

    def lost(self, message: protocol.Lost, _request: Request) -> None:
        """Copies are gone or unreadable."""
        for key in message.keys:
            self.counters["corrupt_files"] += message.corrupt
            self._carry_out(self.catalog.lose(message.server, key))

    def peer_down(self, down: protocol.Down) -> None:
        """Release what a dead incarnation held."""
        account = self.catalog.stored.accounts.get(down.id)
        if account is not None and account.incarnation == down.incarnation:
            self._carry_out(self.catalog.close_tier(down.id))
            return
        for reservation in self.catalog.release_owner(down.id, down.incarnation):
            if reservation.location is not None and reservation.location.name:
                self.actor.loop.call_later(LATE_WRITE_S, self._abort, [reservation])
            else:
                self._abort([reservation])

    def _expire(self) -> None:
        self._abort(self.catalog.expired(time.monotonic() - RESERVATION_S))

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
        kinds = {one.server: one.kind for one in self.catalog.stored.accounts.values()}
        rows: list[protocol.DumpRow] = []
        # With a tier named, its rows may all lie behind those of others.
        for node in self.catalog.latest(0 if message.tier else message.limit):
            rows += index_rows.rows_of(node, kinds, time.time())
        for reservation in self.catalog.reservations.by_token.values():
            rows.append(index_rows.writing_row(reservation, kinds[reservation.server]))
        if message.tier:
            rows = [row for row in rows if row.tier == message.tier]
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
            tier = self.actor.boot.settings["tiers"][server.removeprefix("tier:")]
            tiers.append(
                protocol.TierStats(
                    server=server, kind=tier.get("kind", server.removeprefix("tier:")),
                    quota_bytes=tier["quota_bytes"], stored_bytes=0, reserved_bytes=0, rows=0, up=False,
                    note="is not running",
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
