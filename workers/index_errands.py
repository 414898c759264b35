"""What the index has decided, on its way to tiers and to those who wait."""

import asyncio
from collections import Counter
from collections.abc import Iterable

from barrel_inference import protocol
from barrel_inference.actor import Actor
from barrel_inference.errors import BarrelError
from barrel_inference.protocol import Location
from barrel_inference.tiers.catalog import Catalog
from barrel_inference.tiers.reservations import Reservation
from barrel_inference.tiers.stored import Changes


class Errands:
    """Carries changes out.

    A deletion is sent before anything that is decided later, and each tier does what it is told in that order. So a place
    that was given up is empty before anybody is promised it again.
    """

    def __init__(self, actor: Actor, catalog: Catalog, counters: "Counter[str]") -> None:
        self.actor = actor
        self.catalog = catalog
        self.counters = counters
        self._settled: dict[bytes, asyncio.Event] = {}  # by the key that somebody waits for

    def settled(self, key: bytes) -> asyncio.Event:
        """Set when the node on its way is published or given up."""
        return self._settled.setdefault(key, asyncio.Event())

    def carry_out(self, changes: Changes, *, give_back: bool = False) -> "list[asyncio.Task[int]]":
        """Tell tiers and waiters what has changed; the tasks end when the tiers have deleted, with the bytes that this freed."""
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

    async def _delete(self, server: str, locations: list[Location], give_back: bool) -> int:
        peer = self.actor.peers.get(server)
        if peer is None:
            return 0  # its bytes are gone with it, or it reports them again
        room = protocol.Room(
            owner=self.actor.id, owner_incarnation=self.actor.incarnation, deletes=locations, names=[], sizes=[],
            give_back=give_back,
        )  # fmt: skip
        try:
            return (await peer.call(room, protocol.Roomed)).freed_bytes
        except BarrelError as error:
            self.actor.log.warning("delete.failed", server=server, code=error.code)
            return 0

    def abort(self, reservations: Iterable[Reservation]) -> None:
        """Give promises back."""
        changes = Changes()
        for reservation in reservations:
            changes.add(self.catalog.abort(reservation.token))
        self.carry_out(changes)
