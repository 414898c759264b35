"""The I/O side of the cache in a model process: what a lookup finds becomes opened nodes, what a save wants becomes images.

Runs on the I/O thread's loop. File reads, checksums and page faults go to a thread pool; exports to the engine thread, as
chores between decode calls.
"""

import asyncio
import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from barrel_inference import protocol
from barrel_inference.actor import Actor, Peer, settle
from barrel_inference.errors import BarrelError, TierUnavailable
from barrel_inference.protocol import Location, MatchedNode, Namespace, NewNode, SaveReason
from barrel_inference.tiers import key as keys
from barrel_inference.tiers import kvc
from barrel_inference.tiers.arena import Arena, ArenaGone
from barrel_inference.workers.model import grid
from barrel_inference.workers.model.chain import cut_points, find_seam
from barrel_inference.workers.model.effects import ComingNode, Found, SaveOrder, StoredNode
from barrel_inference.workers.model.engine import Engine, Logits
from barrel_inference.workers.model.images import ImageReader
from barrel_inference.workers.model.job import Job, Stage
from barrel_inference.workers.model.scheduler import Scheduler

T = TypeVar("T")

# A lookup that takes longer than this (beyond what it was asked to wait) is given up: the prompt is computed instead.
LOOKUP_DEADLINE_S = 2.0
CALL_DEADLINE_S = 10.0
WRITE_DEADLINE_S = 120.0

# A save that waits for staging memory holds its sequence. When a request wants one, or the disk has not made room by then,
# the rest of the save is dropped: nobody waits for a slow disk.
STAGING_WAIT_S = 10.0
STAGING_LOOK_S = 0.05

# More than an image has beside its cells: header, tokens, text.
_IMAGE_HEAD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What became of a save, as far as it is certain when its nodes are accepted."""

    reason: SaveReason
    key: bytes | None  # of the whole save; None if not every node was accepted
    created_tokens: int


@dataclass(slots=True)
class _Part:
    """One node on its way."""

    node: NewNode
    start: int
    end: int
    cells_bytes: int
    snapshot: bytes
    logits: Logits
    token: int = 0
    location: Location | None = None
    pack_ns: int = 0


class CacheClient:
    """Restores and saves of one model."""

    def __init__(
        self, actor: Actor, engine: Engine, scheduler: Scheduler, *, model_id: str, server: str, block_tokens: int,
        min_reuse_tokens: int, resume_wait_ms: int, evict_timeout_s: float, deterministic: bool, staging: Arena | None,
    ) -> None:  # fmt: skip
        self.actor = actor
        self.engine = engine
        self.scheduler = scheduler
        self.model_id = model_id
        self.server = server
        self.block_tokens = block_tokens
        self.min_reuse_tokens = min_reuse_tokens
        self.resume_wait_ms = resume_wait_ms
        self.evict_timeout_s = evict_timeout_s
        self.deterministic = deterministic
        self.staging = staging
        self.reader = ImageReader(actor.runtime_dir)
        self.fingerprint = engine.info.fingerprint  # the effective one: adapters included
        # One thread: it verifies nodes while earlier ones are imported, which takes about as long.
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._next_writer = 0
        self._planning = asyncio.Lock()
        self._staged: dict[int, int] = {}  # offset in the staging arena by reservation token
        self._slab_freed = asyncio.Event()

    def warm_up(self) -> None:
        """The first restore after a start finds its memory touched: page faults are most of the difference to later ones."""
        info = self.engine.info
        if info.cacheable and info.has_cells and info.n_cells:
            self._reading.submit(self.reader.warm, image_bytes(self.engine, self.block_tokens))

    def namespace(self, salt: bytes) -> Namespace:
        """The namespace of a tenant's requests to this model."""
        info, params = self.engine.info, self.engine.info.ctx_params_hash
        if self.deterministic:  # another grid makes other slices, and those other bits
            params = hashlib.sha256(params + keys.pack_u32([self.block_tokens])).digest()
        return Namespace(self.fingerprint, f"{info.quant_type}/{info.quant_bits}", params, salt)

    # --- restore

    async def find(self, job: Job, live_tokens: int) -> Found:
        """Look a prompt up and open what it can reuse; never raises for anything that can go wrong with a cache."""
        wanted = [*job.prompt, *job.generated]
        rendered = self.engine.rendered
        try:
            match = await self.actor.peer("index").call(
                protocol.Lookup(
                    namespace=self.namespace(job.salt), model_id=self.model_id, text=b"".join(map(rendered, wanted)),
                    parent_key=job.spec.parent_key, wait_ms=self.resume_wait_ms if job.spec.parent_key else 0,
                    live_tokens=live_tokens,
                ),
                protocol.Match,
                deadline_s=LOOKUP_DEADLINE_S + self.resume_wait_ms / 1000,
            )  # fmt: skip
        except BarrelError:
            return Found(miss_reason="index_down")
        stored = [token for node in match.nodes for token in keys.unpack_u32(node.token_ids)]
        seam = find_seam(stored, wanted, rendered)
        if self.deterministic:
            seam = grid.stored_part(
                seam, [_end(node) for node in match.nodes], len(job.prompt), self.block_tokens,
                has_snapshots=self.engine.info.needs_snapshot,
            )  # fmt: skip
        if not match.nodes or seam.caller_tokens < min(self.min_reuse_tokens, len(wanted)):
            self._drop_claim(match.claim)
            reason = match.miss_reason or "too_short"
            return Found(miss_reason=reason, divergence_byte=match.divergence_byte)
        needed = [node for node in match.nodes if node.start_tokens < seam.stored_tokens]
        nodes = tuple(
            ComingNode(node.start_tokens, _end(node), self._reading.submit(self._open, node)) for node in needed
        )
        return Found(
            match.claim, job.salt, tuple(stored[: _end(needed[-1])]), seam, nodes, match.via, match.miss_reason,
            match.divergence_byte,
        )  # fmt: skip

    def _open(self, node: MatchedNode) -> StoredNode | None:
        """Open the fastest copy that can be read; the others are reported. Runs on a reader's thread."""
        found: StoredNode | None = None
        corrupt: list[tuple[bytes, str]] = []
        for copy in node.copies:
            peer = self.actor.peers.get(copy.server)
            if peer is None or peer.incarnation != copy.incarnation:
                continue
            began_ns = time.perf_counter_ns()
            try:
                opened = self.reader.open(copy, node.key, root=peer.about.get("root", ""))
                if len(opened.image.logits) not in (0, self.engine.info.logits_bytes):
                    raise kvc.CorruptImage(f"{len(opened.image.logits)} bytes of logits")
            except (kvc.CorruptImage, OSError):
                corrupt.append((node.key, copy.server))
                continue
            found = StoredNode(
                node.key, copy.server, peer.about.get("kind", ""), node.start_tokens, _end(node), opened.image.cells,
                opened.image.snapshot if node.snapshot else None, opened.image.logits or None, opened.is_intact,
                time.perf_counter_ns() - began_ns,
            )  # fmt: skip
            break
        if corrupt:
            report = protocol.CheckIn(claim=0, corrupt=corrupt)
            self.actor.loop.call_soon_threadsafe(self.actor.cast, "index", report)
        return found

    def check_in(self, found: Found, used: Sequence[StoredNode], corrupt: Sequence[StoredNode]) -> None:
        """Drop a claim and report what was used and what could not be."""
        if found.claim or used or corrupt:
            self.actor.cast(
                "index",
                protocol.CheckIn(
                    claim=found.claim,
                    used_keys=[node.key for node in used],
                    corrupt=[(node.key, node.server) for node in corrupt],
                ),
            )

    def _drop_claim(self, claim: int) -> None:
        if claim:
            self.actor.cast("index", protocol.CheckIn(claim=claim))

    # --- save

    async def save(self, order: SaveOrder, accepted: "asyncio.Future[SaveResult]") -> None:
        """Store a prefix as a chain of nodes; `accepted` is set when every node has its place, or has none."""
        packed, told = False, False

        def tell() -> None:
            nonlocal told
            if not told:
                told = True
                self.scheduler.post(lambda: self.scheduler.save_published(order))

        # Whoever waits for an evict save waits no longer than that; the save goes on.
        late = self.actor.loop.call_later(self.evict_timeout_s, tell) if order.reason is SaveReason.EVICT else None
        try:
            namespace = self.namespace(order.salt)
            async with self._planning:  # the next save goes on from what this one has reserved
                plan, parts = await self._plan(order, namespace)
                planned = len(parts)
                await self._size(order, namespace, parts)
                complete = await self._reserve(namespace, parts) and len(parts) == planned
            result = SaveResult(order.reason, self._key_at(order, namespace, len(order.tokens)) if complete else None,
                                sum(part.end - part.start for part in parts if part.token))  # fmt: skip
            if not accepted.done():
                accepted.set_result(result)
            exported: list[tuple[_Part, memoryview | None]] = []
            writes: list[asyncio.Task[None]] = []

            def write() -> None:
                writes.extend(asyncio.create_task(self._finish_part(namespace, part, view)) for part, view in exported)
                exported.clear()

            room_until_s = time.monotonic() + STAGING_WAIT_S
            for part in parts:
                if part.token:
                    exported.append((part, await self._pack(order, namespace, part, write, room_until_s)))
            self.scheduler.post(lambda: self.scheduler.save_packed(order.seq))
            packed = True
            write()
            await asyncio.gather(*writes)
            if complete and (order.pinned or (plan.inside_key is not None and not parts)):
                await self._mark(order, namespace, plan, parts)
        except BarrelError as error:
            self.actor.log.info("save.dropped", reason=order.reason.value, code=error.code)
            self.actor.count(saves_dropped=1)
        finally:
            if not packed:
                self.scheduler.post(lambda: self.scheduler.save_packed(order.seq))
            if not accepted.done():
                accepted.set_result(SaveResult(order.reason, None, 0))
            if late is not None:
                late.cancel()
            tell()

    def _index(self) -> Peer:
        return self.actor.peer("index")

    def _key_at(self, order: SaveOrder, namespace: Namespace, length: int) -> bytes:
        return keys.key_of(namespace, b"".join(map(self.engine.rendered, order.tokens[:length])))

    async def _plan(self, order: SaveOrder, namespace: Namespace) -> tuple[protocol.Planned, list[_Part]]:
        pieces = [self.engine.rendered(token) for token in order.tokens]
        lengths = [len(piece) for piece in pieces]
        plan = await self._index().call(
            protocol.SavePlan(
                server=self.server, namespace=namespace, token_ids=keys.pack_u32(order.tokens),
                token_bytes=keys.pack_u32(lengths),
                text=b"".join(pieces),
            ),
            protocol.Planned,
            deadline_s=CALL_DEADLINE_S,
        )  # fmt: skip
        if plan.inside_key is not None and not self._wants_own_end(order):
            return plan, []
        kept = self._kept(plan, len(order.tokens))
        parent, start = kept[-1][:2] if kept else (None, 0)
        digest = keys.start(namespace)
        digest.update(b"".join(pieces[:start]))
        parts: list[_Part] = []
        logits_at, row = order.logits or (0, b"")
        for a, b in cut_points(start, len(order.tokens), self.block_tokens, (*order.snapshots, logits_at)):
            text = b"".join(pieces[a:b])
            digest.update(text)
            key = digest.digest()
            snapshot = order.snapshots.get(b, b"")
            node = NewNode(
                key=key, parent_key=parent, start_tokens=a, token_ids=keys.pack_u32(order.tokens[a:b]),
                token_bytes=keys.pack_u32(lengths[a:b]), text=text, size_bytes=0, reason=order.reason,
                snapshot=bool(snapshot), pinned=order.pinned and b == len(order.tokens),
            )  # fmt: skip
            parts.append(_Part(node, a, b, 0, snapshot, row if b == logits_at else b""))
            parent = key
        return plan, parts

    def _wants_own_end(self, order: SaveOrder) -> bool:
        """Has a save to end with a node even where a longer one has its tokens? A row of logits belongs to a node's end, and a
        deterministic prompt's tail serves that prompt only."""
        return self.deterministic or (order.logits is not None and order.logits[0] == len(order.tokens))

    def _kept(self, plan: protocol.Planned, length: int) -> list[tuple[bytes, int, list[str]]]:
        """The stored nodes that a save goes on from. Deterministic: those on the grid, unless all of it is stored: a tail
        was computed for another prompt."""
        if not self.deterministic or (plan.nodes and plan.nodes[-1][1] == length):
            return plan.nodes
        return list(itertools.takewhile(lambda node: node[1] % self.block_tokens == 0, plan.nodes))

    async def _size(self, order: SaveOrder, namespace: Namespace, parts: list[_Part]) -> None:
        """Ask the engine for the size of each export; what is not whole any more, and all after it, is left off."""
        if not parts:
            return
        sizes = await self._on_engine(lambda: [self.engine.cells_bytes(order.seq, p.start, p.end) for p in parts])
        whole = next((i for i, size in enumerate(sizes) if size < 0), len(sizes))
        if whole < len(parts):
            del parts[whole:]
            self.actor.count(saves_dropped=1)
        for part, size in zip(parts, sizes, strict=False):
            part.cells_bytes = size
            part.node = _with_size(part.node, self._layout(part, namespace).size_bytes)

    async def _reserve(self, namespace: Namespace, parts: list[_Part]) -> bool:
        """Get a place for each node; True when all of them will be there."""
        if not parts:
            return True
        reply = await self._index().call(
            protocol.Reserve(
                namespace=namespace, model_id=self.model_id, server=self.server, nodes=[p.node for p in parts]
            ),
            protocol.Grants,
            deadline_s=CALL_DEADLINE_S,
        )
        dropped = False
        for part, grant in zip(parts, reply.grants, strict=True):
            if grant.status == "granted" and not dropped:
                part.token, part.location = grant.token, grant.location
            elif grant.status == "granted":
                self.actor.cast("index", protocol.Abort(tokens=[grant.token]))
            elif grant.status not in ("already_present", "conflict"):
                dropped = True
        return not dropped

    async def _pack(
        self, order: SaveOrder, namespace: Namespace, part: _Part, make_room: Callable[[], None], room_until_s: float
    ) -> memoryview | None:
        """Export one node into its slab, or into staging; None = there was no room, or the cells were gone."""
        view = await self._target(part, make_room, room_until_s)
        if view is None:
            self.actor.cast("index", protocol.Abort(tokens=[part.token]))
            self.actor.count(saves_dropped=1)
            return None
        layout = self._layout(part, namespace)

        def export() -> bool:
            began_ns = time.perf_counter_ns()
            layout.snapshot(view)[:] = part.snapshot
            layout.logits(view)[:] = part.logits
            cells = layout.cells(view)
            done = not part.cells_bytes or self.engine.export_cells(order.seq, part.start, part.end, cells)
            part.pack_ns += time.perf_counter_ns() - began_ns
            return done

        if not await self._on_engine(export):
            self._release_target(part)
            self.actor.cast("index", protocol.Abort(tokens=[part.token], reason="failed"))
            return None
        return view

    async def _finish_part(self, namespace: Namespace, part: _Part, view: memoryview | None) -> None:
        """Seal an image and publish it; a tier that fails makes it a miss later, not an error now."""
        if view is None:
            return
        meta, layout = self._meta(part.node, namespace), self._layout(part, namespace)
        self.actor.count(pack_total_ns=part.pack_ns + await asyncio.to_thread(_seal, view, meta, layout))
        assert part.location is not None
        try:
            if part.location.name:
                await self._write(part)
            else:
                await self._index().call(
                    protocol.Publish(token=part.token, location=part.location), protocol.Ok, deadline_s=CALL_DEADLINE_S
                )
        except BarrelError as error:
            self.actor.log.info("save.lost", code=error.code, process=error.details.get("process"))
            self.actor.cast("index", protocol.Abort(tokens=[part.token], reason="failed"))
        finally:
            del view
            self._release_target(part)

    async def _write(self, part: _Part) -> None:
        """Hand an image to a writer; if that one dies, to another."""
        assert part.location is not None
        peer = self.actor.peer(part.location.server)  # or the error that it is down
        for attempt in range(2):
            writers = sorted(peer_id for peer_id in self.actor.peers if peer_id.startswith("writer:"))
            if not writers:
                break
            self._next_writer += 1
            writer = self.actor.peers[writers[self._next_writer % len(writers)]]
            try:
                await writer.call(
                    protocol.Write(
                        token=part.token, owner=self.actor.id, owner_incarnation=self.actor.incarnation,
                        offset=self._staged[part.token], size_bytes=part.node.size_bytes, key=part.node.key,
                        location=part.location, root=peer.about.get("root", ""),
                    ),
                    protocol.Written,
                    deadline_s=WRITE_DEADLINE_S,
                )  # fmt: skip
                return
            except BarrelError:
                if attempt or writer.id in self.actor.peers:
                    raise
        raise TierUnavailable("no writer is running")

    async def _mark(
        self, order: SaveOrder, namespace: Namespace, plan: protocol.Planned, parts: Sequence[_Part]
    ) -> None:
        """Name the end of a save that is no node's end, or pin it."""
        node_key = parts[-1].node.key if parts else plan.inside_key or plan.nodes[-1][0]
        await self._index().call(
            protocol.AddMark(
                namespace=namespace, key=self._key_at(order, namespace, len(order.tokens)), node_key=node_key,
                tokens=len(order.tokens), reason=order.reason, pinned=order.pinned,
            ),
            protocol.Ok,
            deadline_s=CALL_DEADLINE_S,
        )  # fmt: skip

    # --- memory

    async def _target(self, part: _Part, make_room: Callable[[], None], room_until_s: float) -> memoryview | None:
        """Warm memory for an image: the leased slab of an arena, or a staging slab as soon as one is free.

        Args:
            make_room: sends what the save has in staging memory on its way. Not before it has to: sealing takes memory's
                speed from the exports, which the engine waits for.
        """
        assert part.location is not None
        size = part.node.size_bytes
        if not part.location.name:
            peer = self.actor.peers.get(part.location.server)
            if peer is None or peer.incarnation != part.location.incarnation:
                return None
            try:
                return await asyncio.to_thread(self._map_slab, part.location, size)
            except ArenaGone:
                return None  # the tier has died since it gave the place
        if self.staging is None or size > self.staging.capacity_bytes:
            return None
        while (offset := self.staging.allocate(size)) is None:
            make_room()
            is_wanted = any(job.stage is Stage.PLACING for job in self.scheduler.waiting)
            if is_wanted or time.monotonic() > room_until_s:
                return None
            self._slab_freed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._slab_freed.wait(), STAGING_LOOK_S)
        self._staged[part.token] = offset
        return self.staging.view(offset, size)

    def _map_slab(self, location: Location, size: int) -> memoryview:
        mapping = self.reader.mapping(location)
        mapping.prefault(location.offset, size)
        return mapping.view(location.offset, size)

    def _release_target(self, part: _Part) -> None:
        offset = self._staged.pop(part.token, None)
        if offset is not None and self.staging is not None:
            self.staging.free(offset)
            self._slab_freed.set()

    async def _on_engine(self, function: Callable[[], T]) -> T:
        """Run a function as a chore of the engine thread."""
        future: asyncio.Future[T] = self.actor.loop.create_future()

        def run() -> None:
            result = function()
            self.actor.loop.call_soon_threadsafe(settle, future, result)

        self.scheduler.post_chore(run)
        return await future

    def _layout(self, part: _Part, namespace: Namespace) -> kvc.Layout:
        return kvc.layout(self._meta(part.node, namespace), part.cells_bytes, len(part.snapshot), len(part.logits))

    def _meta(self, node: NewNode, namespace: Namespace) -> kvc.Meta:
        return kvc.Meta(
            namespace=namespace, model_id=self.model_id, key=node.key, parent_key=node.parent_key,
            start_tokens=node.start_tokens, token_ids=node.token_ids, token_bytes=node.token_bytes, text=node.text,
            reason=node.reason, snapshot=node.snapshot, pinned=node.pinned, created_unix_s=float(int(time.time())),
        )  # fmt: skip


def _seal(view: memoryview, meta: kvc.Meta, layout: kvc.Layout) -> int:
    """Seal an image; the nanoseconds that it computed, without those that it waited for the seals beside it."""
    began_ns = time.thread_time_ns()
    kvc.seal(view, meta, layout)
    return time.thread_time_ns() - began_ns


def image_bytes(engine: Engine, block_tokens: int) -> int:
    """About what the image of a whole node takes."""
    info = engine.info
    return info.memory_bytes.get("kv", 0) // max(1, info.n_cells) * block_tokens + info.logits_bytes + _IMAGE_HEAD_BYTES


def _end(node: MatchedNode) -> int:
    return node.start_tokens + len(node.token_ids) // 4


def _with_size(node: NewNode, size_bytes: int) -> NewNode:
    return NewNode(
        key=node.key, parent_key=node.parent_key, start_tokens=node.start_tokens, token_ids=node.token_ids,
        token_bytes=node.token_bytes, text=node.text, size_bytes=size_bytes, reason=node.reason, snapshot=node.snapshot,
        pinned=node.pinned,
    )  # fmt: skip
