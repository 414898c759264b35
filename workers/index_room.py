"""Room for saves: nodes are judged, promised and given a place by their tier, or are told why not."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping

from barrel_inference import protocol
from barrel_inference.actor import Actor, Request
from barrel_inference.errors import BarrelError
from barrel_inference.protocol import Location, NewNode
from barrel_inference.tiers.catalog import Catalog
from barrel_inference.tiers.reservations import Reservation
from barrel_inference.tiers.stored import Changes
from barrel_inference.workers.index_errands import Errands

ROOM_DEADLINE_S = 8.0  # below the deadline of those who reserve: they hear no, and not nothing


class Rooms:
    """Answers `Reserve`."""

    def __init__(self, actor: Actor, catalog: Catalog, counters: "Counter[str]", errands: Errands) -> None:
        self.actor = actor
        self.catalog = catalog
        self.counters = counters
        self.errands = errands

    async def reserve(
        self, message: protocol.Reserve, request: Request, owner: tuple[str, int] | None
    ) -> protocol.Grants:
        """Places for nodes, root first; what does not fit is left off at the end."""
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
            self.errands.carry_out(changes)
            placed = await self._place(message.server, owner, wanted, deletes)
            if request.deadline_s is not None and time.monotonic() > request.deadline_s:
                self.errands.abort(wanted)  # nobody hears the answer
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
            self.errands.abort(wanted)
            return {}
        places: dict[int, Location | None] = room.result()
        return places

    async def _room(
        self, server: str, owner: tuple[str, int], wanted: list[Reservation], deletes: list[Location]
    ) -> dict[int, Location | None] | None:
        places: dict[int, Location | None] = {}
        asked = wanted
        for attempt in range(2):
            room = protocol.Room(
                owner=owner[0], owner_incarnation=owner[1], deletes=deletes,
                names=[r.node.key for r in asked], sizes=[r.node.size_bytes for r in asked],
            )  # fmt: skip
            try:
                reply = await self.actor.peer(server).call(room, protocol.Roomed)
            except BarrelError as error:
                self.actor.log.warning("room.failed", server=server, code=error.code)
                return None
            places.update((r.token, location) for r, location in zip(asked, reply.locations, strict=True))
            asked = [r for r in asked if places[r.token] is None and r.token in self.catalog.reservations.by_token]
            # A medium that is overdrawn by far is others' trouble: all our rows could go, and nothing would be gained.
            at_most_bytes = 2 * sum(r.node.size_bytes for r in asked)
            if attempt or not 0 < reply.lacking_bytes <= at_most_bytes:
                break
            deletes = self._make_more_room(server, reply.lacking_bytes)
        self._note_places(wanted, places)
        return places

    def _make_more_room(self, server: str, lacking_bytes: int) -> list[Location]:
        """The medium has less than the quota says, because of others or of whole blocks: own rows go, as they do for the
        quota. Else nothing new would ever be saved there again."""
        changes = self.catalog.evict([server], lacking_bytes, time.time())
        deletes = changes.deletes.pop(server, [])
        self.errands.carry_out(changes)
        return deletes

    def _note_places(self, wanted: list[Reservation], places: Mapping[int, Location | None]) -> None:
        changes = Changes()
        for reservation in wanted:
            location = places[reservation.token]
            if reservation.token in self.catalog.reservations.by_token:
                reservation.location = location
                if location is None:
                    changes.add(self.catalog.abort(reservation.token))
            elif location is not None:  # its owner died, or was told no, while the tier was busy
                changes.frees.append(location)
        self.errands.carry_out(changes)

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
