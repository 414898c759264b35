"""The prefix trees of the cache: which prefixes are stored, node by node. Pure.

One tree per namespace. A node holds the bytes of at most one block of tokens and starts where its parent ends; its key is
the key of the prefix that it ends. Children are sorted by their bytes, so the longest common prefix with a prompt is at a
neighbour of the prompt's insertion point: a lookup costs what the prompt costs, however many rows there are.

Every node in a tree has at least one copy; a node that loses its last one goes, and its descendants with it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from barrel_inference.protocol import Location, Namespace, SaveReason
from barrel_inference.tiers import key as keys

if TYPE_CHECKING:
    from hashlib import _Hash

# Siblings of which one is the beginning of the other come from saves that ran at the same time; that many are looked at.
_PREFIX_SIBLINGS = 4


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

    def children_of(self, node: Node | None) -> list[Node]:
        """The children of a node, or of the empty prefix."""
        return self.roots if node is None else node.children

    def match(self, text: bytes) -> list[Step]:
        """The path whose bytes share most with `text`; only its last node may be matched in part."""
        return self._best(self.roots, text, 0)[1]

    def _best(self, children: list[Node], text: bytes, at: int) -> tuple[int, list[Step]]:
        best: tuple[int, list[Step]] = (at, [])
        for child, common in _candidates(children, text, at):
            if common < len(child.text):
                found = (at + common, [Step(child, common)])
            else:
                end, below = self._best(child.children, text, at + common)
                found = (end, [Step(child, common), *below])
            if found[0] > best[0] or (found[0] == best[0] and common == len(child.text) and not best[1]):
                best = found
            elif found[0] == best[0] and found[1] and found[1][-1].matched_bytes == len(found[1][-1].node.text):
                best = found  # as long, and ends where a node ends: the identical prefix
        return best

    def stored(self, token_ids: bytes, text: bytes) -> tuple[list[Node], Node | None]:
        """The chain of whole nodes along these very tokens, and a child that goes on past their end with the same ones."""
        chain: list[Node] = []
        at_token, at_byte = 0, 0
        children = self.roots
        while at_token < len(token_ids):
            whole, beyond = None, None
            for child, _ in _candidates(children, text, at_byte):
                ids = token_ids[at_token : at_token + len(child.token_ids)]
                if child.token_ids == ids:
                    whole = child
                elif len(ids) < len(child.token_ids) and child.token_ids.startswith(ids):
                    beyond = child
            if whole is None:
                return chain, beyond
            chain.append(whole)
            at_token += len(whole.token_ids)
            at_byte += len(whole.text)
            children = whole.children
        return chain, None

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


def _candidates(children: list[Node], text: bytes, at: int) -> Iterator[tuple[Node, int]]:
    """Children that share bytes with the text from `at`: the neighbours of its place among them."""
    if not children or at >= len(text):
        return
    # No child is longer than a block; a little more than the longest decides the order.
    rest = text[at : at + 65536]
    place = bisect_left(children, rest, key=_text)
    if place < len(children) and (common := common_bytes(children[place].text, text, at)):
        yield children[place], common
    for index in range(place - 1, max(-1, place - 1 - _PREFIX_SIBLINGS), -1):
        common = common_bytes(children[index].text, text, at)
        if not common:
            return
        yield children[index], common


def _position(siblings: list[Node], node: Node) -> int:
    index = bisect_left(siblings, node.text, key=_text)
    while siblings[index] is not node:
        index += 1
    return index


def _text(node: Node) -> bytes:
    return node.text
