"""Everything the index knows: trees, accounts, reservations, claims. Pure: calls in, values and commands out.

The index process asks and obeys; it is the only one that changes a catalog. What has to be done at a tier comes back as
locations to delete; nothing here waits.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from barrel_inference.protocol import (
    Location,
    MatchedNode,
    Namespace,
    NewNode,
    SaveReason,
    StoredRow,
    Tier,
)
from barrel_inference.tiers import key as keys
from barrel_inference.tiers.eviction import Victims, hits_now
from barrel_inference.tiers.prefix_tree import BadKey, Mark, Node, Step, Tree
from barrel_inference.tiers.reservations import Account, Reservation, Reservations

_FASTEST_FIRST = {Tier.RAM: 0, Tier.RAM_FILE: 1, Tier.DISK: 2}


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to a lookup."""

    steps: tuple[Step, ...]
    matched_bytes: int
    is_whole: bool  # the prompt's own key is a node's or a mark's
    parent_tokens: int  # tokens that the given parent key stands for; 0 = it is no prefix of the prompt, or unknown
    miss_reason: str | None
    divergence_byte: int | None


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


@dataclass(slots=True)
class Changes:
    """What a call has done that others must hear of."""

    deletes: dict[str, list[Location]] = field(default_factory=dict)  # bytes to be deleted, by server
    committed: list[Location] = field(default_factory=list)
    saved: list[SaveReason] = field(default_factory=list)
    evicted: int = 0
    dropped_bytes: int = 0

    def delete(self, location: Location) -> None:
        """A copy has left the index; its bytes have to go."""
        self.deletes.setdefault(location.server, []).append(location)
        self.dropped_bytes += location.size_bytes


class Catalog:
    """The state of the index."""

    def __init__(self, first_token: int = 0) -> None:
        self.trees: dict[bytes, Tree] = {}
        self.nodes: dict[bytes, Node] = {}
        self.marks: dict[bytes, tuple[Node, Mark]] = {}
        self.accounts: dict[str, Account] = {}
        self.victims: dict[str, Victims] = {}
        self.reservations = Reservations(last_token=first_token)
        self.claims: dict[int, Claim] = {}
        self.orphans: dict[bytes, list[StoredRow]] = {}  # complete rows whose parent no tier has reported yet
        self.touched: set[bytes] = set()
        self._next_claim = 0

    # --- tiers

    def open_tier(self, server: str, kind: Tier, quota_bytes: int, incarnation: int, note: str) -> None:
        """A tier begins to report its rows; whatever an older incarnation had is gone already."""
        self.accounts[server] = Account(server, kind, quota_bytes, incarnation, note=note)
        self.victims[server] = Victims(server)

    def close_tier(self, server: str) -> Changes:
        """A tier is down: its copies and reservations go."""
        changes = Changes()
        self.accounts.pop(server, None)
        self.victims.pop(server, None)
        for reservation in [r for r in self.reservations.by_token.values() if r.server == server]:
            self.reservations.remove(reservation.token)
        for node in [n for n in self.nodes.values() if server in n.copies]:
            if node.key in self.nodes:
                self._drop_copy(node, server, changes)
        for rows in self.orphans.values():
            rows[:] = [row for row in rows if row.location.server != server]
        changes.deletes.pop(server, None)
        return changes

    def tree(self, namespace: Namespace) -> Tree:
        """The tree of a namespace, made on first use."""
        name = keys.namespace_id(namespace)
        if name not in self.trees:
            self.trees[name] = Tree(namespace)
        return self.trees[name]

    def restore_row(self, row: StoredRow, now_s: float) -> Changes:
        """A tier reports a complete image: from its scan, or found by its sweep."""
        changes = Changes()
        account = self.accounts.get(row.location.server)
        if account is None or account.incarnation != row.location.incarnation:
            return changes
        known = self.nodes.get(row.key)
        if known is not None and known.copies.get(row.location.server) == row.location:
            return changes  # a replay that was begun again
        account.stored_bytes += row.location.size_bytes
        account.rows += 1
        self._place_row(row, now_s, changes)
        return changes

    def _place_row(self, row: StoredRow, now_s: float, changes: Changes) -> None:
        node = self.nodes.get(row.key)
        if node is None and row.parent_key is not None and row.parent_key not in self.nodes:
            self.orphans.setdefault(row.parent_key, []).append(row)
            return
        if node is None:
            node = _node_of(row)
            parent = self.nodes[row.parent_key] if row.parent_key is not None else None
            try:
                self.tree(row.namespace).attach(node, parent)
            except BadKey:
                self._forget_row(row, changes)
                return
            self.nodes[node.key] = node
        elif row.location.server in node.copies or node.token_ids != row.token_ids:
            self._forget_row(row, changes)
            return
        self._merge(node, row)
        self._add_copy(node, row.location, now_s)
        for child in self.orphans.pop(row.key, []):
            self._place_row(child, now_s, changes)

    def _merge(self, node: Node, row: StoredRow) -> None:
        node.last_used_unix_s = max(node.last_used_unix_s, row.last_used_unix_s)
        node.hits = max(node.hits, row.hits)
        node.pinned = node.pinned or row.pinned
        for key, tokens, reason, pinned in row.marks:
            self._mark(node, Mark(key, tokens, SaveReason(reason), pinned))

    def _forget_row(self, row: StoredRow, changes: Changes) -> None:
        account = self.accounts[row.location.server]
        account.stored_bytes -= row.location.size_bytes
        account.rows -= 1
        changes.delete(row.location)

    def drop_orphans(self) -> Changes:
        """Every tier has reported: rows whose parent nobody has can never be reached."""
        changes = Changes()
        for rows in self.orphans.values():
            for row in rows:
                self._forget_row(row, changes)
        self.orphans.clear()
        return changes

    # --- lookup

    def lookup(self, namespace: Namespace, text: bytes, parent_key: bytes | None) -> Found:
        """The longest stored prefix of a prompt."""
        tree = self.trees.get(keys.namespace_id(namespace))
        if tree is None or not tree.roots:
            return Found((), 0, False, 0, "no_entry", None)
        steps = tree.match(text)
        matched = sum(step.matched_bytes for step in steps)
        whole_key = None
        if matched == len(text):
            whole_key = keys.key_of(namespace, text)
        is_whole = whole_key is not None and (whole_key in self.nodes or whole_key in self.marks)
        miss = None if steps else "diverged"
        divergence = matched if matched < len(text) else None
        return Found(tuple(steps), matched, is_whole, self._parent_tokens(parent_key, steps, text), miss, divergence)

    def _parent_tokens(self, parent_key: bytes | None, steps: list[Step], text: bytes) -> int:
        """The parent's length, if its bytes are a prefix of the prompt: then it lies on the matched path."""
        if parent_key is None:
            return 0
        for step in steps:
            whole = step.matched_bytes == len(step.node.text)
            if step.node.key == parent_key:
                return step.node.end_tokens if whole else 0
            for mark in step.node.marks:
                if mark.key == parent_key:
                    inside = _bytes_inside(step.node, mark.tokens)
                    return mark.tokens if inside <= step.matched_bytes else 0
        return 0

    def claim(self, owner: str, incarnation: int, steps: Iterable[Step]) -> int:
        """Protect a path until `release`."""
        self._next_claim += 1
        nodes = [step.node for step in steps]
        for node in nodes:
            node.claims += 1
        self.claims[self._next_claim] = Claim(owner, incarnation, nodes)
        return self._next_claim

    def release(self, claim: int) -> list[Node]:
        """Drop a claim; unknown ones are fine."""
        found = self.claims.pop(claim, None)
        if found is None:
            return []
        for node in found.nodes:
            node.claims -= 1
        return found.nodes

    def used(self, key: bytes, now_s: float) -> None:
        """A node was restored."""
        node = self.nodes.get(key)
        if node is not None:
            node.hits = hits_now(node, now_s) + 1
            node.last_used_unix_s = now_s
            self.touched.add(key)

    def refresh(self, key: bytes, now_s: float) -> None:
        """A save went on from a node."""
        if (node := self.nodes.get(key)) is not None:
            node.last_used_unix_s = now_s
            self.touched.add(key)

    def wire_nodes(self, found: Found) -> list[MatchedNode]:
        """A path as it travels; copies fastest first."""
        out = []
        for step in found.steps:
            node = step.node
            copies = sorted(node.copies.values(), key=self._speed)
            out.append(
                MatchedNode(
                    key=node.key, start_tokens=node.start_tokens, token_ids=node.token_ids, text_bytes=len(node.text),
                    matched_bytes=step.matched_bytes, snapshot=node.snapshot, copies=copies,
                )
            )  # fmt: skip
        return out

    def _speed(self, location: Location) -> int:
        return _FASTEST_FIRST[self.accounts[location.server].kind]

    # --- saves

    def plan(self, namespace: Namespace, token_ids: bytes, text: bytes) -> tuple[list[Planned], Node | None]:
        """The chain of whole nodes along these tokens, those on their way included, and a stored child that goes on past
        the last token."""
        nodes, beyond = self.tree(namespace).stored(token_ids, text)
        chain = [Planned(node.key, node.end_tokens, tuple(sorted(node.copies))) for node in nodes]
        while beyond is None and (coming := self._coming(namespace, chain, token_ids)) is not None:
            chain.append(Planned(coming.node.key, _end(coming.node), (coming.server,)))
        return chain, beyond

    def _coming(self, namespace: Namespace, chain: list[Planned], token_ids: bytes) -> Reservation | None:
        """A reserved node that goes on from the end of a chain with these tokens."""
        parent_key, start = (chain[-1].key, chain[-1].end_tokens) if chain else (None, 0)
        for reservation in self.reservations.by_token.values():
            node = reservation.node
            follows = node.parent_key == parent_key and node.start_tokens == start
            if follows and reservation.namespace == namespace and token_ids.startswith(node.token_ids, start * 4):
                return reservation
        return None

    def judge(self, namespace: Namespace, node: NewNode) -> str:
        """May this node be reserved? `granted`, or the reason why not."""
        if node.key in self.nodes:
            return "already_present"
        if node.key in self.reservations.by_key:
            return "conflict"
        digest = self._digest_above(namespace, node.parent_key, node.start_tokens)
        if digest is None:
            return "no_parent"
        digest = digest.copy()
        digest.update(node.text)
        return "granted" if digest.digest() == node.key else "bad_key"

    def _digest_above(self, namespace: Namespace, parent_key: bytes | None, at_tokens: int):  # type: ignore[no-untyped-def]
        tree = self.tree(namespace)
        if parent_key is None:
            return tree.digest if at_tokens == 0 else None
        if (parent := self.nodes.get(parent_key)) is not None:
            return parent.digest if parent.tree is tree and parent.end_tokens == at_tokens else None
        above = self.reservations.by_key.get(parent_key)
        if above is None or above.namespace != namespace:
            return None
        if _end(above.node) != at_tokens:
            return None
        digest = self._digest_above(namespace, above.node.parent_key, above.node.start_tokens)
        if digest is None:
            return None
        digest = digest.copy()
        digest.update(above.node.text)
        return digest

    def make_room(self, server: str, size_bytes: int, now_s: float, spare: frozenset[bytes]) -> tuple[bool, Changes]:
        """Take the least valuable copies out until `size_bytes` fit; False = they never will."""
        changes = Changes()
        account = self.accounts[server]
        if size_bytes > account.quota_bytes:
            return False, changes
        if account.lacks(size_bytes):
            for node in self.victims[server].take(now_s, lambda n: n.key in spare):
                self._drop_copy(node, server, changes, now_s)
                changes.evicted += 1
                if not account.lacks(size_bytes):
                    break
        return not account.lacks(size_bytes), changes

    def reserve(self, reservation: Reservation) -> None:
        """Promise the room."""
        self.reservations.add(reservation)
        self.accounts[reservation.server].reserved_bytes += reservation.node.size_bytes

    def abort(self, token: int) -> Reservation | None:
        """Give a promise back, and those of nodes that would hang below it; returns the first."""
        reservation = self.reservations.remove(token)
        if reservation is None:
            return None
        if (account := self.accounts.get(reservation.server)) is not None:
            account.reserved_bytes -= reservation.node.size_bytes
        return reservation

    def publish(self, reservation: Reservation, location: Location, now_s: float) -> Changes:
        """A node's bytes are complete: it joins its tree, or waits for its parent."""
        changes = Changes()
        reservation.published, reservation.location = True, location
        parent_key = reservation.node.parent_key
        if parent_key is None or parent_key in self.nodes:
            self._join(reservation, now_s, changes)
        elif parent_key not in self.reservations.by_key:
            self.abort(reservation.token)
            changes.delete(location)
        return changes

    def _join(self, reservation: Reservation, now_s: float, changes: Changes) -> None:
        self.abort(reservation.token)
        new, location = reservation.node, reservation.location
        assert location is not None
        account = self.accounts[reservation.server]
        node = Node(
            new.key, new.parent_key, new.start_tokens, new.token_ids, new.token_bytes, new.text, new.reason,
            new.snapshot, reservation.model_id, now_s, now_s,
        )  # fmt: skip
        parent = self.nodes[new.parent_key] if new.parent_key is not None else None
        tree = self.tree(reservation.namespace)
        try:
            tree.attach(node, parent)
        except BadKey:
            changes.delete(location)
            return
        self.nodes[node.key] = node
        account.stored_bytes += location.size_bytes
        account.rows += 1
        self._add_copy(node, location, now_s)
        if new.pinned:
            self._pin(tree, node)
        changes.committed.append(location)
        if reservation.is_last:
            changes.saved.append(new.reason)
        for waiting in self.reservations.waiting_for(new.key):
            self._join(waiting, now_s, changes)

    def add_mark(self, node_key: bytes, mark: Mark) -> bool:
        """Name a point of a stored node; False if the node is not there."""
        node = self.nodes.get(node_key)
        if node is None or node.tree is None:
            return False
        if mark.pinned:
            self._pin(node.tree, node)
        if mark.key != node.key:
            self._mark(node, mark)
        elif mark.pinned:
            node.pinned = True
        self.touched.add(node.key)
        return True

    def _mark(self, node: Node, mark: Mark) -> None:
        if (old := self.marks.get(mark.key)) is not None:
            old[1].pinned = old[1].pinned or mark.pinned
            return
        node.marks.append(mark)
        self.marks[mark.key] = (node, mark)

    def _pin(self, tree: Tree, node: Node) -> None:
        """One static head per namespace: the older one is let go."""
        old = tree.pinned
        if old is not None and old is not node:
            old.pinned = False
            for mark in old.marks:
                mark.pinned = False
            self.touched.add(old.key)
        tree.pinned = node
        node.pinned = True

    # --- copies going

    def lose(self, server: str, key: bytes) -> Changes:
        """A copy turned out to be gone or unreadable."""
        changes = Changes()
        node = self.nodes.get(key)
        if node is not None and server in node.copies:
            self._drop_copy(node, server, changes)
        return changes

    def evict(self, servers: list[str], size_bytes: int | None, now_s: float) -> Changes:
        """Take copies out until so many bytes are freed (None: everything unpinned and unclaimed)."""
        changes = Changes()
        for server in servers:
            if server not in self.victims:
                continue
            for node in self.victims[server].take(now_s, lambda _node: False):
                if size_bytes is not None and changes.dropped_bytes >= size_bytes:
                    break
                self._drop_copy(node, server, changes, now_s)
                changes.evicted += 1
        return changes

    def release_owner(self, owner: str, incarnation: int) -> list[Reservation]:
        """An incarnation is down: its claims go; returns its open reservations."""
        for claim, found in list(self.claims.items()):
            if (found.owner, found.owner_incarnation) == (owner, incarnation):
                self.release(claim)
        return self.reservations.of(owner, incarnation)

    def _add_copy(self, node: Node, location: Location, now_s: float) -> None:
        node.copies[location.server] = location
        self.victims[location.server].add(node, now_s)

    def _drop_copy(self, node: Node, server: str, changes: Changes, now_s: float = 0.0) -> None:
        location = node.copies.pop(server)
        self._account_for(location)
        changes.delete(location)
        if not node.copies:
            self._drop_subtree(node, changes)
        parent = node.parent
        if parent is not None and server in parent.copies and not parent.has_child_on(server):
            self.victims[server].add(parent, now_s)

    def _drop_subtree(self, node: Node, changes: Changes) -> None:
        """Without this node nothing below it can be reached."""
        assert node.tree is not None
        node.tree.detach(node)
        for below in list(node.subtree()):
            for location in below.copies.values():
                self._account_for(location)
                changes.delete(location)
            below.copies.clear()
            del self.nodes[below.key]
            self.touched.discard(below.key)
            for mark in below.marks:
                self.marks.pop(mark.key, None)
            for waiting in [r for r in self.reservations.by_token.values() if r.node.parent_key == below.key]:
                self._drop_reservation(waiting, changes)

    def _drop_reservation(self, reservation: Reservation, changes: Changes) -> None:
        self.abort(reservation.token)
        if reservation.published and reservation.location is not None:
            changes.delete(reservation.location)

    def _account_for(self, location: Location) -> None:
        account = self.accounts.get(location.server)
        if account is not None:
            account.stored_bytes -= location.size_bytes
            account.rows -= 1

    # --- views

    def rows(self) -> Iterator[Node]:
        """Every node, last use first."""
        return iter(sorted(self.nodes.values(), key=lambda node: -node.last_used_unix_s))

    def check(self) -> None:
        """The catalog's invariants."""
        for tree in self.trees.values():
            tree.check()
        for server, account in self.accounts.items():
            account.check()
            stored = sum(n.copies[server].size_bytes for n in self.nodes.values() if server in n.copies)
            orphaned = sum(
                row.location.size_bytes
                for rows in self.orphans.values()
                for row in rows
                if row.location.server == server
            )
            reserved = sum(r.node.size_bytes for r in self.reservations.by_token.values() if r.server == server)
            assert (account.stored_bytes, account.reserved_bytes) == (stored + orphaned, reserved), server
            assert stored + reserved <= account.quota_bytes or account.rows == 0, server


def _end(node: NewNode) -> int:
    return node.start_tokens + len(node.token_ids) // 4


def _bytes_inside(node: Node, tokens: int) -> int:
    """Bytes of a node up to a point, given in tokens from the root."""
    return sum(keys.unpack_u32(node.token_bytes)[: tokens - node.start_tokens])


def _node_of(row: StoredRow) -> Node:
    return Node(
        row.key, row.parent_key, row.start_tokens, row.token_ids, row.token_bytes, row.text, row.reason, row.snapshot,
        row.model_id, row.created_unix_s, row.last_used_unix_s,
    )  # fmt: skip
