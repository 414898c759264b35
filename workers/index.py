"""The cache index: the one process that decides what is stored, found, protected and evicted.

Run as `python -P -m barrel_inference.workers.index index`. Restart: always. While it is down, prompts are computed cold and
nothing is saved; models keep running. After a restart the tiers tell it what they hold.

Decisions are the catalog's (pure); this file carries them to the tiers and answers.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from barrel_inference import protocol
from barrel_inference.actor import Actor, Request, run
from barrel_inference.errors import BarrelError, NotFound, ProtocolError
from barrel_inference.protocol import Location, SaveReason, Tier
from barrel_inference.tiers.catalog import Catalog, Changes, Found
from barrel_inference.tiers.prefix_tree import Mark, Node
from barrel_inference.tiers.reservations import Reservation

REBUILD_WAIT_S = 0.2  # a lookup waits that long for the tiers' replay
ROOM_DEADLINE_S = 10.0
TOUCH_S = 5.0
# After a model's death its writer may still be finishing from its own mapping.
LATE_WRITE_S = 10.0
FIRST_WORDS = 6

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
        # Tokens of an earlier incarnation must never be taken for new ones.
        self.catalog = Catalog(first_token=actor.incarnation % 2**31 << 32)
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._expected = {
            f"tier:{name}" for name, tier in actor.boot.settings.get("tiers", {}).items() if tier.get("enabled", True)
        }
        self._replayed = asyncio.Event()
        self._published: dict[bytes, asyncio.Event] = {}
        self._room_locks: dict[str, asyncio.Lock] = {}
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
        actor.every(TOUCH_S, self.touch)
        if not self._expected:
            self._replayed.set()
        return {}

    # --- lookup

    async def lookup(self, message: protocol.Lookup, _request: Request) -> protocol.Match:
        """The longest stored prefix, claimed for the model that asks."""
        rebuilding = not self._replayed.is_set()
        if rebuilding:
            await _within(self._replayed.wait(), REBUILD_WAIT_S)
            rebuilding = not self._replayed.is_set()
        if (
            message.parent_key is not None
            and message.wait_ms
            and message.parent_key in self.catalog.reservations.by_key
        ):
            event = self._published.setdefault(message.parent_key, asyncio.Event())
            await _within(event.wait(), message.wait_ms / 1000)
        began_ns = time.perf_counter_ns()
        found = self.catalog.lookup(message.namespace, message.text, message.parent_key)
        self.counters["longest_prefix_probes"] += not found.is_whole
        self.counters["longest_prefix_ns"] += time.perf_counter_ns() - began_ns
        claim = 0
        if found.steps and (owner := self._owner(message.model_id)) is not None:
            claim = self.catalog.claim(*owner, found.steps)
        miss = found.miss_reason
        if miss is not None and rebuilding:
            miss = "index_rebuilding"
        return protocol.Match(
            claim=claim, nodes=self.catalog.wire_nodes(found), via=_via(found), miss_reason=miss,
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
            if changes.deletes:
                self.counters["corrupt_files"] += 1
                self.actor.spawn(self._carry_out(changes))

    # --- saves

    def save_plan(self, message: protocol.SavePlan, _request: Request) -> protocol.Planned:
        """What of a sequence is stored already."""
        chain, beyond = self.catalog.plan(message.namespace, message.token_ids, message.text)
        now_s = time.time()
        for planned in chain:  # a save that finds them is a use: the conversation goes on
            self.catalog.refresh(planned.key, now_s)
        return protocol.Planned(
            nodes=[(planned.key, planned.end_tokens, list(planned.servers)) for planned in chain],
            inside_key=beyond.key if beyond is not None else None,
        )

    async def reserve(self, message: protocol.Reserve, _request: Request) -> protocol.Grants:
        """Places for nodes, root first; what does not fit is left off at the end."""
        owner = self._owner(message.model_id)
        tier = self.actor.peers.get(message.server)
        if owner is None or tier is None or message.server not in self.catalog.accounts:
            return protocol.Grants(grants=[protocol.Grant(status="tier_down") for _ in message.nodes])
        lock = self._room_locks.setdefault(message.server, asyncio.Lock())
        async with lock:  # victims that are chosen must be gone before others count on their room
            statuses, made, changes = self._promise(message, owner)
            grants = await self._place(message, owner, statuses, made, changes)
        self.counters["duplicate_dropped"] += sum(grant.status in ("already_present", "conflict") for grant in grants)
        self.counters["saves_dropped"] += any(grant.status in ("no_space", "tier_down") for grant in grants)
        return protocol.Grants(grants=grants)

    def _promise(
        self, message: protocol.Reserve, owner: tuple[str, int]
    ) -> tuple[list[str], list[Reservation | None], Changes]:
        """Judge each node and reserve its bytes; collects what has to be deleted for them."""
        now_s, all_changes = time.time(), Changes()
        statuses: list[str] = []
        made: list[Reservation | None] = []
        spare = frozenset(node.parent_key for node in message.nodes if node.parent_key is not None)
        for number, node in enumerate(message.nodes):
            status = self.catalog.judge(message.namespace, node)
            reservation = None
            if status == "granted":
                fits, changes = self.catalog.make_room(message.server, node.size_bytes, now_s, spare)
                _add(all_changes, changes)
                if fits:
                    reservation = Reservation(
                        self.catalog.reservations.new_token(), message.namespace, message.model_id, node,
                        message.server, *owner, is_last=number == len(message.nodes) - 1,
                    )  # fmt: skip
                    self.catalog.reserve(reservation)
                else:
                    status = "no_space"
            statuses.append(status)
            made.append(reservation)
        return statuses, made, all_changes

    async def _place(
        self, message: protocol.Reserve, owner: tuple[str, int], statuses: list[str],
        made: list[Reservation | None], changes: Changes,
    ) -> list[protocol.Grant]:  # fmt: skip
        """Have the tier delete and allocate; a promise that it cannot keep is taken back, and those after it."""
        wanted = [reservation for reservation in made if reservation is not None]
        deletes = changes.deletes.pop(message.server, [])
        self.counters["evictions"] += changes.evicted
        await self._carry_out(changes)
        locations: list[Location | None] = [None] * len(wanted)
        if wanted or deletes:
            try:
                reply = await self.actor.peer(message.server).call(
                    protocol.Room(
                        owner=owner[0], owner_incarnation=owner[1], deletes=deletes,
                        names=[r.node.key for r in wanted], sizes=[r.node.size_bytes for r in wanted],
                    ),
                    protocol.Roomed,
                    deadline_s=ROOM_DEADLINE_S,
                )  # fmt: skip
                locations = list(reply.locations)
            except BarrelError as error:
                self.actor.log.warning("room.failed", server=message.server, code=error.code)
        places = dict(zip((r.token for r in wanted), locations, strict=True))
        grants = []
        for status, reservation in zip(statuses, made, strict=True):
            location = places[reservation.token] if reservation is not None else None
            if reservation is not None and location is None:
                self.catalog.abort(reservation.token)
                status = "no_space"
            elif reservation is not None:
                reservation.location = location
            grants.append(
                protocol.Grant(
                    status=status, token=reservation.token if location and reservation else 0, location=location
                )
            )
        return grants

    def check_reservation(self, message: protocol.CheckReservation, _request: Request) -> protocol.Ok:
        """Is a writer's token still good?"""
        if message.token not in self.catalog.reservations.by_token:
            raise NotFound(f"no reservation {message.token}")
        return protocol.Ok()

    async def publish(self, message: protocol.Publish, _request: Request) -> protocol.Ok:
        """A node is complete."""
        reservation = self.catalog.reservations.by_token.get(message.token)
        if reservation is None or message.location.server not in self.catalog.accounts:
            # A file is found by its tier's next sweep; a slab of an arena is free again.
            self.actor.cast(message.location.server, protocol.Free(locations=[message.location]))
            raise NotFound(f"no reservation {message.token}")
        changes = self.catalog.publish(reservation, message.location, time.time())
        for reason in changes.saved:
            self.counters[f"saves_{reason.value}"] += 1
        for location in changes.committed:
            self.actor.cast(location.server, protocol.Committed(location=location))
        self._wake(reservation.node.key)
        await self._carry_out(changes)
        return protocol.Ok()

    def _wake(self, key: bytes) -> None:
        if (event := self._published.pop(key, None)) is not None:
            event.set()

    def abort(self, message: protocol.Abort, _request: Request) -> None:
        """Promises are given back."""
        for token in message.tokens:
            reservation = self.catalog.abort(token)
            if reservation is not None:
                self._wake(reservation.node.key)
                if reservation.location is not None:
                    self.actor.cast(reservation.server, protocol.Free(locations=[reservation.location]))

    def add_mark(self, message: protocol.AddMark, _request: Request) -> protocol.Ok:
        """Name a point of a stored node."""
        is_new = message.key not in self.catalog.marks and message.key not in self.catalog.nodes
        mark = Mark(message.key, message.tokens, message.reason, message.pinned)
        if not self.catalog.add_mark(message.node_key, mark):
            raise NotFound("the node of the mark is not stored")
        if is_new or message.reason is SaveReason.AGENT_PREFIX:
            self.counters[f"saves_{message.reason.value}"] += 1
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
            servers = [server for server, account in self.catalog.accounts.items() if account.kind.value in kinds]
        changes = self.catalog.evict(servers, message.bytes, time.time())
        self.counters["evictions"] += changes.evicted
        evicted = protocol.Evicted(rows=changes.evicted, bytes=changes.dropped_bytes)
        await self._carry_out(changes, give_back=True)
        return evicted

    async def _carry_out(self, changes: Changes, *, give_back: bool = False) -> None:
        """Have the tiers delete what has left the index."""
        for server, locations in changes.deletes.items():
            peer = self.actor.peers.get(server)
            if peer is None:
                continue
            room = protocol.Room(
                owner=self.actor.id, owner_incarnation=self.actor.incarnation, deletes=locations, names=[], sizes=[],
                give_back=give_back,
            )  # fmt: skip
            try:
                await peer.call(room, protocol.Roomed, deadline_s=ROOM_DEADLINE_S)
            except BarrelError as error:
                self.actor.log.warning("delete.failed", server=server, code=error.code)

    # --- tiers and deaths

    async def replay(self, message: protocol.Replay, _request: Request) -> protocol.Ok:
        """A tier reports what it holds."""
        account = self.catalog.accounts.get(message.server)
        if account is None or account.incarnation != message.incarnation:
            if account is not None:
                await self._carry_out(self.catalog.close_tier(message.server))
            self.catalog.open_tier(message.server, message.kind, message.quota_bytes, message.incarnation, message.note)
        changes, now_s = Changes(), time.time()
        for row in message.rows:
            _add(changes, self.catalog.restore_row(row, now_s))
        self._release_leases(message)
        if message.last:
            self.catalog.accounts[message.server].replayed = True
            _add(changes, self._all_replayed())
            over = self.catalog.make_room(message.server, 0, now_s, frozenset())[1]
            self.counters["evictions"] += over.evicted
            _add(changes, over)
        await self._carry_out(changes)
        return protocol.Ok()

    def _release_leases(self, message: protocol.Replay) -> None:
        """Places that a dead process was writing are free again; those of the living are found when they publish."""
        for owner, incarnation, location in message.leases:
            peer = self.actor.peers.get(owner)
            if peer is None or peer.incarnation != incarnation:
                self.actor.cast(message.server, protocol.Free(locations=[location]))

    def _all_replayed(self) -> Changes:
        up = {server for server, account in self.catalog.accounts.items() if account.replayed}
        if not self._expected <= up:
            return Changes()
        self._replayed.set()
        return self.catalog.drop_orphans()

    async def adopt(self, message: protocol.Adopt, _request: Request) -> protocol.Ok:
        """A complete file that no reservation led to."""
        row = message.row
        if row.key in self.catalog.nodes and row.location.server in self.catalog.nodes[row.key].copies:
            return protocol.Ok()
        if (reservation := self.catalog.reservations.by_key.get(row.key)) is not None:
            self.catalog.abort(reservation.token)
        changes = self.catalog.restore_row(row, time.time())
        refused = row.location in changes.deletes.get(row.location.server, [])
        self._wake(row.key)
        if row.key not in self.catalog.nodes and row.parent_key is not None:
            _add(changes, self.catalog.drop_orphans())
            refused = True
        await self._carry_out(changes)
        if refused:
            raise NotFound("the row belongs to nothing that is stored")
        return protocol.Ok()

    def lost(self, message: protocol.Lost, _request: Request) -> None:
        """Copies are gone or unreadable."""
        for key in message.keys:
            changes = self.catalog.lose(message.server, key)
            self.counters["corrupt_files"] += message.corrupt
            if changes.deletes:
                self.actor.spawn(self._carry_out(changes))

    def peer_down(self, down: protocol.Down) -> None:
        """Release what a dead incarnation held."""
        account = self.catalog.accounts.get(down.id)
        if account is not None and account.incarnation == down.incarnation:
            self.actor.spawn(self._carry_out(self.catalog.close_tier(down.id)))
            return
        for reservation in self.catalog.release_owner(down.id, down.incarnation):
            if reservation.location is not None and reservation.location.name:
                self.actor.loop.call_later(LATE_WRITE_S, self._give_up, reservation.token)
            else:
                self._give_up(reservation.token)

    def _give_up(self, token: int) -> None:
        reservation = self.catalog.abort(token)
        if reservation is not None:
            self._wake(reservation.node.key)
            if reservation.location is not None:
                self.actor.cast(reservation.server, protocol.Free(locations=[reservation.location]))

    def touch(self) -> None:
        """Tell the tiers about recency, hits, marks and pins that have moved."""
        touched, self.catalog.touched = self.catalog.touched, set()
        for key in touched:
            node = self.catalog.nodes.get(key)
            for location in node.copies.values() if node is not None else ():
                assert node is not None
                self.actor.cast(location.server, _touch(node, location))

    async def drain(self, _actor: Actor) -> None:
        """Nothing may be forgotten at a stop."""
        self.touch()

    # --- views

    def counted(self, message: protocol.Counted, _request: Request) -> None:
        """Add to the counters; only known names, so that no peer can fill memory."""
        for name, delta in message.deltas.items():
            if name in COUNTERS:
                self.counters[name] += delta

    def values(self) -> dict[str, int]:
        """Every counter; byte gauges from the accounts."""
        by_kind = dict.fromkeys(Tier, 0)
        for account in self.catalog.accounts.values():
            by_kind[account.kind] += account.stored_bytes
        return dict(self.counters) | {f"bytes_{kind.value}": count for kind, count in by_kind.items()}

    def dump(self, message: protocol.Dump, _request: Request) -> protocol.DumpRows:
        """The rows, last use first."""
        now_s, rows = time.time(), []
        for node in self.catalog.rows():
            for location in node.copies.values():
                kind = self.catalog.accounts[location.server].kind
                if message.tier in (None, kind.value):
                    rows += _dump_rows(node, location, kind, now_s)
            if message.limit and len(rows) >= message.limit:
                return protocol.DumpRows(rows=rows[: message.limit])
        for reservation in self.catalog.reservations.by_token.values():
            rows.append(_writing_row(reservation, self.catalog.accounts[reservation.server].kind))
        return protocol.DumpRows(rows=rows)

    def stats(self, _message: protocol.CacheStats, _request: Request) -> protocol.CacheStatsReply:
        """The tiers' accounts."""
        tiers = [
            protocol.TierStats(
                server=a.server, kind=a.kind.value, quota_bytes=a.quota_bytes, stored_bytes=a.stored_bytes,
                reserved_bytes=a.reserved_bytes, rows=a.rows, up=a.server in self.actor.peers, note=a.note,
            )
            for a in self.catalog.accounts.values()
        ]  # fmt: skip
        return protocol.CacheStatsReply(
            tiers=tiers,
            namespaces=len(self.catalog.trees),
            nodes=len(self.catalog.nodes),
            marks=len(self.catalog.marks),
        )


async def _within(what: Awaitable[object], timeout_s: float) -> None:
    """Wait, but no longer than that."""
    try:
        await asyncio.wait_for(what, timeout_s)
    except TimeoutError:
        return


def _via(found: Found) -> str:
    if found.is_whole:
        return "exact"
    if found.parent_tokens and found.steps:
        last = found.steps[-1].node
        deepest = last.end_tokens if found.steps[-1].matched_bytes == len(last.text) else last.start_tokens
        if found.parent_tokens >= deepest:
            return "parent"
    return "longest" if found.steps else "none"


def _add(target: Changes, more: Changes) -> None:
    for server, locations in more.deletes.items():
        target.deletes.setdefault(server, []).extend(locations)
    target.committed += more.committed
    target.saved += more.saved
    target.evicted += more.evicted
    target.dropped_bytes += more.dropped_bytes


def _touch(node: Node, location: Location) -> protocol.Touch:
    return protocol.Touch(
        location=location, last_used_unix_s=node.last_used_unix_s, hits=round(node.hits),
        marks=[(mark.key, mark.tokens, mark.reason.value, mark.pinned) for mark in node.marks], pinned=node.pinned,
    )  # fmt: skip


def _dump_rows(node: Node, location: Location, kind: Tier, now_s: float) -> list[protocol.DumpRow]:
    words = b" ".join(node.text.split()[:FIRST_WORDS]).decode(errors="replace")
    age_s = max(0.0, now_s - node.last_used_unix_s)
    where = location.name or f"offset {location.offset}"

    def row(key: bytes, tokens: int, reason: SaveReason, pinned: bool, size_bytes: int) -> protocol.DumpRow:
        return protocol.DumpRow(
            key=key, parent_key=node.parent_key, model_id=node.model_id, tier=kind.value, size_bytes=size_bytes,
            tokens=tokens, text_bytes=node.text_end, status="available", reason=reason.value, hits=round(node.hits),
            refcount=node.claims, pinned=pinned, age_s=age_s, location=where, first_words=words,
        )  # fmt: skip

    marks = [row(mark.key, mark.tokens, mark.reason, mark.pinned, 0) for mark in node.marks]
    return [row(node.key, node.end_tokens, node.reason, node.is_pinned, location.size_bytes), *marks]


def _writing_row(reservation: Reservation, kind: Tier) -> protocol.DumpRow:
    new = reservation.node
    return protocol.DumpRow(
        key=new.key, parent_key=new.parent_key, model_id=reservation.model_id, tier=kind.value, size_bytes=new.size_bytes,
        tokens=new.start_tokens + len(new.token_ids) // 4, text_bytes=len(new.text), status="writing",
        reason=new.reason.value, hits=0, refcount=0, pinned=new.pinned, age_s=0.0, location="",
    )  # fmt: skip


def main() -> int:
    """The process's life; returns its exit status."""
    made: list[IndexProcess] = []

    def make(actor: Actor) -> Callable[[Actor], Awaitable[dict[str, Any] | None]]:
        made.append(IndexProcess(actor))
        return made[0].start

    return run(make, drain=lambda actor: made[0].drain(actor))


if __name__ == "__main__":
    sys.exit(main())
