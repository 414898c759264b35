"""The prefix trees of the cache: which prefixes are stored, node by node. Pure.

One tree per namespace. A node holds the bytes of at most one block of tokens and starts where its parent ends; its key is
the key of the prefix that it ends. Children are sorted by their bytes, so the longest common prefix with a prompt is at a
neighbour of the prompt's insertion point: a lookup costs what the prompt costs, however many rows there are.

Every node in a tree has at least one copy; a node that loses its last one goes, and its descendants with it.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from barrel_inference.protocol import Location, Namespace, SaveReason
from barrel_inference.tiers import key as keys

if TYPE_CHECKING:
    from hashlib import _Hash


@dataclass(slots=True)
class Mark:
    """A named point inside or at the end of a node."""

    key: bytes
    tokens: int  # from the root
    reason: SaveReason
    pinned: bool = False


@dataclass(slots=True, eq=False)
class Node:
    """One stored block of a prefix."""

    key: bytes
    parent_key: bytes | None
    start_tokens: int
    token_ids: bytes
    token_bytes: bytes
    text: bytes
    reason: SaveReason
    snapshot: bool
    model_id: str
    created_unix_s: float
    last_used_unix_s: float
    hits: float = 0.0  # halved every 6 h
    claims: int = 0
    pinned: bool = False
    copies: dict[str, Location] = field(default_factory=dict)
    children: list["Node"] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    parent: "Node | None" = None
    tree: "Tree | None" = None
    digest: "_Hash | None" = None
    text_end: int = 0  # bytes of the whole prefix

    @property
    def end_tokens(self) -> int:
        """Tokens of the whole prefix."""
        return self.start_tokens + len(self.token_ids) // 4

    @property
    def is_pinned(self) -> bool:
        """Is it, or a point in it, pinned?"""
        return self.pinned or any(mark.pinned for mark in self.marks)

    def has_child_on(self, server: str) -> bool:
        """Does a child have a copy there?"""
        return any(server in child.copies for child in self.children)

    def subtree(self) -> Iterator["Node"]:
        """The node and all below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)


@dataclass(frozen=True, slots=True)
class Step:
    """One node on a matched path."""

    node: Node
    matched_bytes: int


class BadKey(ValueError):
    """A node's key is not the SHA-256 of the prefix that it ends."""


class Tree:
    """The nodes of one namespace."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.roots: list[Node] = []
        self.pinned: Node | None = None  # the one node with the namespace's pinned head
        self.digest = keys.start(namespace)
        self._longest_bytes = 0  # of any node's text: no more of a prompt decides its place among siblings

    def children_of(self, node: Node | None) -> list[Node]:
        """The children of a node, or of the empty prefix."""
        return self.roots if node is None else node.children

    def match(self, text: bytes) -> list[Step]:
        """The path whose bytes share most with `text`; only its last node may be matched in part.

        Of paths that share as much, one that ends where a node ends wins: it is the identical prefix.
        """
        best: Node | None = None
        best_end, best_common = 0, 0
        # Not by recursion: a chain is as deep as a conversation is long.
        open_ends: list[tuple[Node | None, int]] = [(None, 0)]
        while open_ends:
            node, at = open_ends.pop()
            for child, common in self._candidates(node, text, at):
                is_whole = common == len(child.text)
                if at + common > best_end or (at + common == best_end and is_whole):
                    best, best_end, best_common = child, at + common, common
                if is_whole:
                    open_ends.append((child, at + common))
        if best is None:
            return []
        return [*(Step(node, len(node.text)) for node in path_to(best.parent)), Step(best, best_common)]

    def stored(self, token_ids: bytes, text: bytes, server: str = "") -> tuple[list[Node], Node | None]:
        """The longest chain of whole nodes along these very tokens, and a child that goes on past their end with the same ones.

        Args:
            server: count copies there only; empty = anywhere.
        """
        best: Node | None = None
        best_at = 0
        open_ends: list[tuple[Node | None, int, int]] = [(None, 0, 0)]
        while open_ends:
            node, at_token, at_byte = open_ends.pop()
            for child, _ in self._candidates(node, text, at_byte):
                ids = token_ids[at_token : at_token + len(child.token_ids)]
                if server and server not in child.copies:
                    continue
                if child.token_ids == ids:
                    end = at_token + len(ids)
                    open_ends.append((child, end, at_byte + len(child.text)))
                    if end > best_at:
                        best, best_at = child, end
                elif ids and child.token_ids.startswith(ids):
                    return path_to(node), child
        return path_to(best), None

    def _candidates(self, node: Node | None, text: bytes, at: int) -> Iterator[tuple[Node, int]]:
        """Every child whose bytes are a prefix of the text from `at`, and one of those that share most with it."""
        children = self.children_of(node)
        if not children or at >= len(text):
            return
        rest = text[at : at + self._longest_bytes + 1]
        place = bisect_left(children, rest, key=_text)
        if place < len(children) and (common := common_bytes(children[place].text, text, at)):
            yield children[place], common
        index = place - 1
        while index >= 0:
            child = children[index]
            common = common_bytes(child.text, text, at)
            if not common:
                return
            yield child, common
            # What is further left and a prefix of the text is a prefix of what this one shares with it.
            is_whole = common == len(child.text)
            index = (index if is_whole else bisect_right(children, rest[:common], hi=index, key=_text)) - 1

    def attach(self, node: Node, parent: Node | None) -> None:
        """Put a node under its parent.

        Raises:
            BadKey: the key, or the place where it starts, does not follow from the parent.
        """
        if node.start_tokens != (parent.end_tokens if parent else 0):
            raise BadKey(f"starts at token {node.start_tokens}, its parent ends elsewhere")
        node.digest = digest_below(self, parent, node.text)
        if node.digest.digest() != node.key:
            raise BadKey("the key is not the SHA-256 of its prefix")
        node.parent, node.tree = parent, self
        node.text_end = (parent.text_end if parent else 0) + len(node.text)
        self._longest_bytes = max(self._longest_bytes, len(node.text))
        insort(self.children_of(parent), node, key=_text)

    def detach(self, node: Node) -> None:
        """Take a node out; what is below it goes along."""
        siblings = self.children_of(node.parent)
        del siblings[_position(siblings, node)]
        if self.pinned is not None and any(below is self.pinned for below in node.subtree()):
            self.pinned = None

    def check(self) -> None:
        """The tree's invariants."""
        for root in self.roots:
            for node in root.subtree():
                assert node.copies, node.key.hex()
                assert [c.text for c in node.children] == sorted(c.text for c in node.children)
                assert all(child.start_tokens == node.end_tokens for child in node.children)
                assert node.claims >= 0


def path_to(node: Node | None) -> list[Node]:
    """The nodes from the root to this one."""
    path: list[Node] = []
    while node is not None:
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def digest_below(tree: Tree, parent: Node | None, text: bytes) -> "_Hash":
    """The SHA-256 state of a prefix that goes on from `parent` with `text`."""
    above = parent.digest if parent is not None else tree.digest
    assert above is not None
    digest = above.copy()
    digest.update(text)
    return digest


def common_bytes(a: bytes, b: bytes, at: int) -> int:
    """How many bytes of `a` agree with `b` from position `at`."""
    high = min(len(a), len(b) - at)
    if a[:high] == b[at : at + high]:
        return high
    low = 0
    while low < high - 1:
        middle = (low + high) // 2
        if a[low:middle] == b[at + low : at + middle]:
            low = middle
        else:
            high = middle
    return low


def _position(siblings: list[Node], node: Node) -> int:
    index = bisect_left(siblings, node.text, key=_text)
    while siblings[index] is not node:
        index += 1
    return index


def _text(node: Node) -> bytes:
    return node.text
