"""What is stored: trees of nodes with their copies, marks, pins, and rows that wait for their parent. Pure.

Every node in a tree has a copy. One that loses its last copy goes; what is below it can then be reached by nobody. If that
was an eviction or a loss, the bytes below go too. If a tier went down, what other tiers have below waits, as it does at a
start: the parent may be reported again.
"""

from dataclasses import dataclass, field

from barrel_inference.protocol import Location, Namespace, NewNode, SaveReason, StoredRow, Tier
from barrel_inference.tiers import key as keys
from barrel_inference.tiers.eviction import Victims
from barrel_inference.tiers.prefix_tree import BadKey, Mark, Node, Tree, digest_below
from barrel_inference.tiers.reservations import Account


@dataclass(slots=True)
class Changes:
    """What a call has done that others must hear of."""

    deletes: dict[str, list[Location]] = field(default_factory=dict)  # rows whose bytes have to go, by server
    frees: list[Location] = field(default_factory=list)  # places that were promised and will not be rows
    committed: list[Location] = field(default_factory=list)
    saved: list[SaveReason] = field(default_factory=list)
    gone: list[bytes] = field(default_factory=list)  # keys of nodes that are not stored any more
    settled: list[bytes] = field(default_factory=list)  # keys that somebody may have waited for
    evicted: int = 0
    dropped_bytes: int = 0

    def delete(self, location: Location) -> None:
        """A copy has left the index; its bytes have to go."""
        self.deletes.setdefault(location.server, []).append(location)
        self.dropped_bytes += location.size_bytes

    def add(self, more: "Changes") -> None:
        """Take over what another call has done."""
        for server, locations in more.deletes.items():
            self.deletes.setdefault(server, []).extend(locations)
        self.frees += more.frees
        self.committed += more.committed
        self.saved += more.saved
        self.gone += more.gone
        self.settled += more.settled
        self.evicted += more.evicted
        self.dropped_bytes += more.dropped_bytes


class Stored:
    """Nodes, copies, marks, pins, and the accounts of the tiers that hold them."""

    def __init__(self) -> None:
        self.trees: dict[bytes, Tree] = {}
        self.nodes: dict[bytes, Node] = {}
        self.marks: dict[bytes, tuple[Node, Mark]] = {}
        self.accounts: dict[str, Account] = {}
        self.victims: dict[str, Victims] = {}
        self.orphans: dict[bytes, list[StoredRow]] = {}  # complete rows by the parent that no tier has reported
        self.touched: set[bytes] = set()

    def tree(self, namespace: Namespace) -> Tree:
        """The tree of a namespace, made on first use."""
        name = keys.namespace_id(namespace)
        if name not in self.trees:
            self.trees[name] = Tree(namespace)
        return self.trees[name]

    # --- tiers

    def open_tier(self, server: str, kind: Tier, quota_bytes: int, incarnation: int, note: str) -> None:
        """A tier begins to report its rows; whatever an older incarnation had is gone already."""
        self.accounts[server] = Account(server, kind, quota_bytes, incarnation, note=note)
        self.victims[server] = Victims(server)

    def close_tier(self, server: str) -> Changes:
        """A tier is down: its copies go, and nobody else's."""
        changes = Changes()
        self.accounts.pop(server, None)
        self.victims.pop(server, None)
        for node in [n for n in self.nodes.values() if server in n.copies]:
            if server in node.copies:
                self.drop_copy(node, server, changes, 0.0, keep_below=True)
        for parent_key, rows in list(self.orphans.items()):
            rows[:] = [row for row in rows if row.location.server != server]
            if not rows:
                del self.orphans[parent_key]
        changes.deletes.pop(server, None)
        return changes

    def restore_row(self, row: StoredRow, now_s: float) -> Changes:
        """A tier reports a complete image: from its scan, or found by its sweep."""
        changes = Changes()
        server = row.location.server
        account = self.accounts.get(server)
        if account is None or account.incarnation != row.location.incarnation:
            return changes
        known = self.nodes.get(row.key)
        if known is not None and server in known.copies:
            if known.copies[server] == row.location and known.token_ids == row.token_ids:
                return changes  # a replay that was begun again
            if known.copies[server].name != row.location.name or not row.location.name:
                changes.delete(row.location)  # a second image of the same prefix: one is enough
                return changes
            self.drop_copy(known, server, Changes(), now_s, keep_below=True)  # the file was replaced
        self._book(row.location)
        waiting = [row]
        while waiting:
            placed = waiting.pop()
            if self._place_row(placed, now_s, changes):
                waiting += self.orphans.pop(placed.key, [])
        return changes

    def _place_row(self, row: StoredRow, now_s: float, changes: Changes) -> bool:
        """Put a row where it belongs; True if children that waited for it can follow."""
        node = self.nodes.get(row.key)
        if node is None and row.parent_key is not None and row.parent_key not in self.nodes:
            self.orphans.setdefault(row.parent_key, []).append(row)
            return False
        if node is None:
            node = Node(
                row.key, row.parent_key, row.start_tokens, row.token_ids, row.token_bytes, row.text, row.reason,
                row.snapshot, row.model_id, row.created_unix_s, row.last_used_unix_s,
            )  # fmt: skip
            if not self.attach(row.namespace, node):
                self._unbook(row.location)
                changes.delete(row.location)
                return False
        elif row.location.server in node.copies or not is_same(node, row):
            self._unbook(row.location)
            changes.delete(row.location)
            return False
        self._merge(node, row)
        node.copies[row.location.server] = row.location
        self.victims[row.location.server].add(node, now_s)
        return True

    def _merge(self, node: Node, row: StoredRow) -> None:
        node.last_used_unix_s = max(node.last_used_unix_s, row.last_used_unix_s)
        node.hits = max(node.hits, row.hits)
        for key, tokens, reason, pinned in row.marks:
            mark = Mark(key, tokens, SaveReason(reason), pinned)
            if key not in self.marks and mark_is_valid(node, mark):
                self._mark(node, mark)
        if row.pinned or any(mark.pinned for mark in node.marks):
            assert node.tree is not None
            now_pinned = node.tree.pinned
            if now_pinned is None or now_pinned.last_used_unix_s <= node.last_used_unix_s:
                self.pin(node.tree, node)
            elif now_pinned is not node:
                self._unpin(node)

    def drop_orphans(self, server: str | None = None) -> Changes:
        """Delete rows whose parent nobody has reported; on one server, or everywhere."""
        changes = Changes()
        for parent_key, rows in list(self.orphans.items()):
            for row in [row for row in rows if server in (None, row.location.server)]:
                rows.remove(row)
                self._unbook(row.location)
                changes.delete(row.location)
            if not rows:
                del self.orphans[parent_key]
        return changes

    # --- nodes

    def attach(self, namespace: Namespace, node: Node) -> bool:
        """Put a node under its parent, which is there; False if its key does not follow from its bytes."""
        parent = self.nodes[node.parent_key] if node.parent_key is not None else None
        tree = self.tree(namespace)
        if parent is not None and parent.tree is not tree:
            return False
        try:
            tree.attach(node, parent)
        except BadKey:
            return False
        self.nodes[node.key] = node
        return True

    def add_copy(self, node: Node, location: Location, now_s: float) -> None:
        """A node is complete there."""
        node.copies[location.server] = location
        self._book(location)
        self.victims[location.server].add(node, now_s)

    def drop_copy(self, node: Node, server: str, changes: Changes, now_s: float, *, keep_below: bool = False) -> None:
        """A copy goes. With the last one the node goes, and all below it (`keep_below`: waits for it to come back)."""
        location = node.copies.pop(server)
        self._unbook(location)
        changes.delete(location)
        if not node.copies:
            self._drop_subtree(node, changes, keep_below=keep_below)
        parent = node.parent
        if parent is not None and server in parent.copies and server in self.victims:
            self.victims[server].add(parent, now_s)

    def _drop_subtree(self, node: Node, changes: Changes, *, keep_below: bool) -> None:
        assert node.tree is not None
        node.tree.detach(node)
        for below in list(node.subtree()):
            for location in below.copies.values():
                if keep_below and location.server in self.accounts:
                    assert below.parent_key is not None
                    self.orphans.setdefault(below.parent_key, []).append(_row_of(below, node.tree, location))
                else:
                    self._unbook(location)
                    changes.delete(location)
            below.copies.clear()
            changes.gone.append(below.key)
            del self.nodes[below.key]
            self.touched.discard(below.key)
            for mark in below.marks:
                self.marks.pop(mark.key, None)

    def _book(self, location: Location) -> None:
        account = self.accounts[location.server]
        account.stored_bytes += location.size_bytes
        account.rows += 1

    def _unbook(self, location: Location) -> None:
        account = self.accounts.get(location.server)
        if account is not None:
            account.stored_bytes -= location.size_bytes
            account.rows -= 1

    # --- marks and pins

    def add_mark(self, node: Node, mark: Mark) -> bool:
        """Name a point of a stored node; True if that is a new row.

        The end of a node has a name already, the node's own; a pin there gets a row of its own if its reason is another.
        """
        if mark.key in self.marks:
            node, old = self.marks[mark.key]
            old.pinned = old.pinned or mark.pinned
            is_new = False
        elif mark.key != node.key or (mark.pinned and mark.reason != node.reason):
            self._mark(node, mark)
            is_new = True
        else:
            is_new = mark.pinned and not node.pinned
        if mark.pinned:
            assert node.tree is not None
            self.pin(node.tree, node)
        self.touched.add(node.key)
        return is_new

    def _mark(self, node: Node, mark: Mark) -> None:
        node.marks.append(mark)
        self.marks[mark.key] = (node, mark)

    def pin(self, tree: Tree, node: Node) -> None:
        """One static head per namespace: the older one is let go."""
        old = tree.pinned
        if old is not None and old is not node:
            self._unpin(old)
        tree.pinned = node
        node.pinned = True
        self.touched.add(node.key)

    def _unpin(self, node: Node) -> None:
        node.pinned = False
        for mark in node.marks:
            mark.pinned = False
        self.touched.add(node.key)


def mark_is_valid(node: Node, mark: Mark) -> bool:
    """Does the mark name a point of this node, by the node's own bytes?"""
    if not node.start_tokens < mark.tokens <= node.end_tokens:
        return False
    assert node.tree is not None
    return digest_below(node.tree, node.parent, node.text[: bytes_inside(node, mark.tokens)]).digest() == mark.key


def bytes_inside(node: Node, tokens: int) -> int:
    """Bytes of a node up to a point, given in tokens from the root."""
    return sum(keys.unpack_u32(node.token_bytes)[: max(0, tokens - node.start_tokens)])


def is_same(node: Node, row: StoredRow | NewNode) -> bool:
    """Is this another copy of the node? Its key alone says so of the bytes, not of how they are cut."""
    mine = (node.parent_key, node.start_tokens, node.token_ids, node.snapshot)
    return mine == (row.parent_key, row.start_tokens, row.token_ids, row.snapshot)


def _row_of(node: Node, tree: Tree, location: Location) -> StoredRow:
    return StoredRow(
        namespace=tree.namespace, model_id=node.model_id, key=node.key, parent_key=node.parent_key,
        start_tokens=node.start_tokens, token_ids=node.token_ids, token_bytes=node.token_bytes, text=node.text,
        reason=node.reason, snapshot=node.snapshot, created_unix_s=node.created_unix_s,
        last_used_unix_s=node.last_used_unix_s, hits=round(node.hits),
        marks=[(mark.key, mark.tokens, mark.reason.value, mark.pinned) for mark in node.marks],
        pinned=node.pinned, location=location,
    )  # fmt: skip
