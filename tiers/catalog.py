"""Everything the index knows and decides: what is stored, what is on its way, what is protected. Pure.

Calls come in, values and commands go out; the index process obeys and is the only one that changes a catalog. Nothing here
waits: what has to be done at a tier comes back as `Changes`.
"""

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from barrel_inference.protocol import Location, MatchedNode, Namespace, NewNode, StoredRow, Tier
from barrel_inference.tiers import key as keys
from barrel_inference.tiers.eviction import hits_now, merged
from barrel_inference.tiers.lookup import Found, look_up
from barrel_inference.tiers.prefix_tree import Mark, Node, Step
from barrel_inference.tiers.reservations import Reservation, Reservations
from barrel_inference.tiers.stored import Changes, Stored, is_same, mark_is_valid

if TYPE_CHECKING:
    from hashlib import _Hash

_FASTEST_FIRST = {Tier.RAM: 0, Tier.RAM_FILE: 1, Tier.DISK: 2}


@dataclass(frozen=True, slots=True)
class Planned:
    """One node of a save that need not be written again."""

    key: bytes
    end_tokens: int
    servers: tuple[str, ...]


@dataclass(slots=True)
class Claim:
    """Nodes that must not be evicted while someone restores them."""

    owner: str
    owner_incarnation: int
    nodes: list[Node]


class Catalog:
    """The state of the index."""

    def __init__(self, first_token: int = 0) -> None:
        self.stored = Stored()
        self.reservations = Reservations(last_token=first_token)
        self.claims: dict[int, Claim] = {}
        self._next_claim = 0

    def close_tier(self, server: str) -> Changes:
        """A tier is down: its copies and reservations go."""
        changes = Changes()
        for reservation in [r for r in self.reservations.by_token.values() if r.server == server]:
            self._give_back(reservation, changes)
        changes.add(self._settled(self.stored.close_tier(server)))
        changes.frees = [location for location in changes.frees if location.server != server]
        changes.deletes.pop(server, None)
        return changes

    def restore_row(self, row: StoredRow, now_s: float) -> Changes:
        """A tier reports a complete image. A promise for the same place is kept by it."""
        changes = Changes()
        promised = self.reservations.by_key.get(row.key)
        if promised is not None and promised.server == row.location.server:
            self._forget(promised)
            changes.settled.append(row.key)
        changes.add(self._settled(self.stored.restore_row(row, now_s)))
        if row.key in self.stored.nodes:
            self._join_waiting(row.key, now_s, changes)
        return changes

    # --- lookup

    def lookup(self, namespace: Namespace, text: bytes, parent_key: bytes | None) -> Found:
        """The longest stored prefix of a prompt."""
        return look_up(self.stored.trees.get(keys.namespace_id(namespace)), namespace, text, parent_key)

    def claim(self, owner: str, incarnation: int, steps: Iterable[Step]) -> int:
        """Protect a path until `release`."""
        self._next_claim += 1
        nodes = [step.node for step in steps]
        for node in nodes:
            node.claims += 1
        self.claims[self._next_claim] = Claim(owner, incarnation, nodes)
        return self._next_claim

    def release(self, claim: int) -> None:
        """Drop a claim; unknown ones are fine."""
        found = self.claims.pop(claim, None)
        for node in found.nodes if found is not None else ():
            node.claims -= 1

    def used(self, key: bytes, now_s: float) -> None:
        """A node was restored."""
        if (node := self.stored.nodes.get(key)) is not None:
            node.hits = hits_now(node, now_s) + 1
            node.last_used_unix_s = now_s
            self.stored.touched.add(key)

    def refresh(self, key: bytes, now_s: float) -> None:
        """A save went on from a node: a use, though no hit."""
        if (node := self.stored.nodes.get(key)) is not None:
            node.hits = hits_now(node, now_s)
            node.last_used_unix_s = now_s
            self.stored.touched.add(key)

    def wire_nodes(self, found: Found) -> list[MatchedNode]:
        """A path as it travels; copies fastest first."""
        return [
            MatchedNode(
                key=node.key, start_tokens=node.start_tokens, token_ids=node.token_ids, text_bytes=len(node.text),
                matched_bytes=matched_bytes, snapshot=node.snapshot,
                copies=sorted(node.copies.values(), key=self._speed),
            )
            for node, matched_bytes in ((step.node, step.matched_bytes) for step in found.steps)
        ]  # fmt: skip

    def _speed(self, location: Location) -> int:
        return _FASTEST_FIRST[self.stored.accounts[location.server].kind]

    # --- saves

    def plan(
        self, namespace: Namespace, token_ids: bytes, text: bytes, server: str = ""
    ) -> tuple[list[Planned], Node | None]:
        """The chain of whole nodes along these tokens, those on their way included, and a stored child that goes on past
        the last token. With `server`: as far as that one has or will have them."""
        nodes, beyond = self.stored.tree(namespace).stored(token_ids, text, server)
        chain = [Planned(node.key, node.end_tokens, tuple(sorted(node.copies))) for node in nodes]
        while beyond is None and (coming := self._coming(namespace, chain, token_ids, server)) is not None:
            chain.append(Planned(coming.node.key, coming.end_tokens, (coming.server,)))
        return chain, beyond

    def _coming(self, namespace: Namespace, chain: list[Planned], token_ids: bytes, server: str) -> Reservation | None:
        """A reserved node that goes on from the end of a chain with these tokens."""
        parent_key, start = (chain[-1].key, chain[-1].end_tokens) if chain else (None, 0)
        for reservation in self.reservations.below(parent_key):
            node = reservation.node
            if server not in ("", reservation.server) or reservation.namespace != namespace:
                continue
            if node.start_tokens == start and token_ids.startswith(node.token_ids, start * 4):
                return reservation
        return None

    def judge(self, namespace: Namespace, node: NewNode, server: str) -> tuple[str, "_Hash | None"]:
        """May this node be reserved? `granted` with the digest of its prefix, or the reason why not."""
        if node.key in self.reservations.by_key:
            return "conflict", None
        known = self.stored.nodes.get(node.key)
        if known is not None and (server in known.copies or not is_same(known, node)):
            return "already_present", None
        above = self._digest_above(namespace, node.parent_key, node.start_tokens)
        if above is None:
            return "no_parent", None
        digest = above.copy()
        digest.update(node.text)
        is_sound = digest.digest() == node.key and _is_well_formed(node)
        return ("granted", digest) if is_sound else ("bad_key", None)

    def _digest_above(self, namespace: Namespace, parent_key: bytes | None, at_tokens: int) -> "_Hash | None":
        tree = self.stored.tree(namespace)
        if parent_key is None:
            return tree.digest if at_tokens == 0 else None
        if (parent := self.stored.nodes.get(parent_key)) is not None:
            return parent.digest if parent.tree is tree and parent.end_tokens == at_tokens else None
        above = self.reservations.by_key.get(parent_key)
        if above is None or above.namespace != namespace or above.end_tokens != at_tokens:
            return None
        return above.digest

    def make_room(
        self, server: str, size_bytes: int, now_s: float, spare: frozenset[bytes] = frozenset()
    ) -> tuple[bool, Changes]:
        """Take the least valuable copies out until `size_bytes` fit; False = they do not."""
        changes = Changes()
        account = self.stored.accounts[server]
        if size_bytes > account.quota_bytes:
            return False, changes
        if account.lacks(size_bytes):
            changes.add(self.stored.drop_orphans(server))  # nobody can find these at present
        if account.lacks(size_bytes):
            for node in self.stored.victims[server].take(now_s, lambda n: self._is_spared(n, spare), pinned_last=True):
                self._evict_one(node, server, changes, now_s)
                if not account.lacks(size_bytes):
                    break
        return not account.lacks(size_bytes), changes

    def _is_spared(self, node: Node, spare: frozenset[bytes]) -> bool:
        """A save that is under way goes on from it."""
        return node.key in spare or self.reservations.has_below(node.key)

    def _evict_one(self, node: Node, server: str, changes: Changes, now_s: float) -> None:
        dropped = Changes()
        self.stored.drop_copy(node, server, dropped, now_s)
        dropped.evicted = sum(map(len, dropped.deletes.values()))  # what it took along has gone as well
        changes.add(self._settled(dropped))

    def reserve(self, reservation: Reservation) -> None:
        """Promise the room."""
        self.reservations.add(reservation)
        self.stored.accounts[reservation.server].reserved_bytes += reservation.node.size_bytes

    def abort(self, token: int) -> Changes:
        """Give a promise back, and those of nodes that would hang below it."""
        changes = Changes()
        if (reservation := self.reservations.by_token.get(token)) is not None:
            self._give_back(reservation, changes)
            if reservation.node.key not in self.stored.nodes:
                self._give_back_below(reservation.node.key, changes)
        return changes

    def publish(self, reservation: Reservation, location: Location, now_s: float) -> Changes:
        """A node's bytes are complete: it joins its tree, or waits for its parent."""
        changes = Changes()
        reservation.published, reservation.location = True, location
        parent_key = reservation.node.parent_key
        if parent_key is None or parent_key in self.stored.nodes:
            self._join(reservation, now_s, changes)
            self._join_waiting(reservation.node.key, now_s, changes)
        elif parent_key not in self.reservations.by_key:
            changes.add(self.abort(reservation.token))
        return changes

    def _join_waiting(self, parent_key: bytes, now_s: float, changes: Changes) -> None:
        """Published nodes whose parent has just joined follow, and those below them."""
        parents = [parent_key]
        while parents:
            for waiting in self.reservations.below(parents.pop()):
                if waiting.published and waiting.node.parent_key in self.stored.nodes:
                    self._join(waiting, now_s, changes)
                    parents.append(waiting.node.key)

    def _join(self, reservation: Reservation, now_s: float, changes: Changes) -> None:
        new, location = reservation.node, reservation.location
        assert location is not None
        node = self.stored.nodes.get(new.key)  # another tier's copy, or one that a tier reported meanwhile
        if node is None:
            node = Node(
                new.key, new.parent_key, new.start_tokens, new.token_ids, new.token_bytes, new.text, new.reason,
                new.snapshot, reservation.model_id, now_s, now_s,
            )  # fmt: skip
            if not self.stored.attach(reservation.namespace, node):
                self._give_back(reservation, changes)
                return
        elif location.server in node.copies or not is_same(node, new):
            self._give_back(reservation, changes)
            return
        self._forget(reservation)
        self.stored.add_copy(node, location, now_s)
        if new.pinned:
            assert node.tree is not None
            self.stored.pin(node.tree, node)
        changes.committed.append(location)
        changes.settled.append(new.key)
        if reservation.is_last:
            changes.saved.append(new.reason)

    def add_mark(self, node_key: bytes, mark: Mark) -> bool | None:
        """Name a point of a stored node: is it a new row? None if there is no such point."""
        node = self.stored.nodes.get(node_key)
        if node is None or not mark_is_valid(node, mark):
            return None
        return self.stored.add_mark(node, mark)

    # --- copies going

    def lose(self, server: str, key: bytes) -> Changes:
        """A copy turned out to be gone or unreadable."""
        changes = Changes()
        node = self.stored.nodes.get(key)
        if node is not None and server in node.copies:
            self.stored.drop_copy(node, server, changes, 0.0)
        return self._settled(changes)

    def evict(self, servers: list[str], size_bytes: int | None, now_s: float) -> Changes:
        """Take copies out until so many bytes are freed, the least valuable of all these servers first (None: everything
        unpinned and unclaimed)."""
        changes = Changes()
        wanted_bytes = math.inf if size_bytes is None else size_bytes
        orders = [self.stored.victims[server] for server in servers if server in self.stored.victims]
        for server, node in merged(orders, now_s, lambda n: self._is_spared(n, frozenset())):
            if changes.dropped_bytes >= wanted_bytes:
                break
            self._evict_one(node, server, changes, now_s)
        for order in orders:  # what nobody can find at present, but may again when its tier is back
            if changes.dropped_bytes < wanted_bytes:
                changes.add(self._settled(self.stored.drop_orphans(order.server)))
        return changes

    def release_owner(self, owner: str, incarnation: int) -> list[Reservation]:
        """An incarnation is down: its claims go; returns its open reservations."""
        for claim, found in list(self.claims.items()):
            if (found.owner, found.owner_incarnation) == (owner, incarnation):
                self.release(claim)
        return self.reservations.of(owner, incarnation)

    def handed(self, token: int, writer: tuple[str, int], *, owner_is_up: bool) -> None:
        """A writer has the image: if the owner is down, the promise is the writer's from now on."""
        if (reservation := self.reservations.by_token.get(token)) is not None:
            reservation.writer = writer
            if not owner_is_up:
                reservation.owner, reservation.owner_incarnation = writer

    def expired(self, before_s: float) -> list[Reservation]:
        """Promises that are so old that nobody will fill them any more."""
        return [r for r in self.reservations.by_token.values() if r.made_s < before_s and not r.published]

    def _settled(self, changes: Changes) -> Changes:
        """Nodes have gone: what was promised below them can never be found."""
        for key in changes.gone:
            if key not in self.stored.nodes and key not in self.reservations.by_key:
                self._give_back_below(key, changes)
        return changes

    def _give_back_below(self, parent_key: bytes, changes: Changes) -> None:
        parents = [parent_key]
        while parents:
            for reservation in self.reservations.below(parents.pop()):
                self._give_back(reservation, changes)
                if reservation.node.key not in self.stored.nodes:
                    parents.append(reservation.node.key)

    def _give_back(self, reservation: Reservation, changes: Changes) -> None:
        self._forget(reservation)
        changes.settled.append(reservation.node.key)
        if reservation.location is not None:
            changes.frees.append(reservation.location)

    def _forget(self, reservation: Reservation) -> None:
        self.reservations.remove(reservation.token)
        account = self.stored.accounts.get(reservation.server)
        if account is not None:
            account.reserved_bytes -= reservation.node.size_bytes

    # --- views

    def latest(self, limit: int) -> list[Node]:
        """Nodes, last use first; all if `limit` is 0."""
        nodes = self.stored.nodes.values()
        if limit:
            return heapq.nlargest(limit, nodes, key=_last_use)
        return sorted(nodes, key=_last_use, reverse=True)

    def text_end(self, reservation: Reservation) -> int:
        """Bytes of the whole prefix that a node on its way will end."""
        length, parent_key = len(reservation.node.text), reservation.node.parent_key
        while parent_key is not None:
            if (parent := self.stored.nodes.get(parent_key)) is not None:
                return length + parent.text_end
            above = self.reservations.by_key.get(parent_key)
            if above is None:  # reported by a tier, and waits for its own parent
                break
            length, parent_key = length + len(above.node.text), above.node.parent_key
        return length

    def check(self) -> None:
        """The catalog's invariants."""
        stored = self.stored
        for tree in stored.trees.values():
            tree.check()
        reachable = {n.key for tree in stored.trees.values() for root in tree.roots for n in root.subtree()}
        assert reachable == stored.nodes.keys()
        waiting = [row for rows in stored.orphans.values() for row in rows]
        for server, account in stored.accounts.items():
            account.check()
            held = [n.copies[server].size_bytes for n in stored.nodes.values() if server in n.copies]
            held += [row.location.size_bytes for row in waiting if row.location.server == server]
            reserved = sum(r.node.size_bytes for r in self.reservations.by_token.values() if r.server == server)
            assert (account.stored_bytes, account.rows, account.reserved_bytes) == (sum(held), len(held), reserved)
        for key, (node, mark) in stored.marks.items():
            assert mark.key == key
            assert mark in node.marks
            assert node.key in stored.nodes
        for node in stored.nodes.values():
            assert not node.is_pinned or (node.tree is not None and node.tree.pinned is node)
        for claim in self.claims.values():
            assert all(node.claims > 0 for node in claim.nodes)


def _is_well_formed(node: NewNode) -> bool:
    """Do ids, lengths and bytes fit together?"""
    if not node.token_ids or len(node.token_ids) % 4 or len(node.token_ids) != len(node.token_bytes):
        return False
    return sum(keys.unpack_u32(node.token_bytes)) == len(node.text)


def _last_use(node: Node) -> float:
    return node.last_used_unix_s
