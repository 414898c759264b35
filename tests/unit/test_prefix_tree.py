"""The prefix tree, against a model that compares everything with everything."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barrel_inference.protocol import Namespace, StoredRow
from barrel_inference.tiers import key as keys
from barrel_inference.tiers.prefix_tree import BadKey, Node, Tree, common_bytes
from tests.unit.cache_rows import OTHER, SPACE, key, row


def node_of(stored: StoredRow) -> Node:
    """A node with one copy."""
    made = Node(
        stored.key, stored.parent_key, stored.start_tokens, stored.token_ids, stored.token_bytes, stored.text,
        stored.reason, stored.snapshot, "m", 0.0, 0.0,
    )  # fmt: skip
    made.copies[stored.location.server] = stored.location
    return made


class Garden:
    """A tree, and the prefixes in it."""

    def __init__(self) -> None:
        self.tree = Tree(SPACE)
        self.nodes: dict[bytes, Node] = {}

    def grow(self, prefix: bytes, text: bytes) -> None:
        """Put a node in, unless its parent is missing or its prefix is there."""
        if prefix + text in self.nodes or (prefix and prefix not in self.nodes):
            return
        made = node_of(row(prefix, text))
        self.tree.attach(made, self.nodes.get(prefix))
        self.nodes[prefix + text] = made

    def longest(self, text: bytes) -> int:
        """How many bytes of `text` any stored prefix shares: every node is compared with it."""
        best = 0
        for prefix, node in self.nodes.items():
            above = prefix[: len(prefix) - len(node.text)]
            if text.startswith(above):
                best = max(best, common_bytes(prefix, text, 0))
        return best


LETTERS = st.binary(min_size=1, max_size=4).map(lambda data: bytes(97 + byte % 2 for byte in data))
GROWTH = st.lists(st.tuples(st.integers(0, 30), LETTERS), max_size=30)


def grown(steps: list[tuple[int, bytes]]) -> Garden:
    """A tree whose nodes go on from any that is there already."""
    garden = Garden()
    for choice, text in steps:
        prefixes = [b"", *garden.nodes]
        garden.grow(prefixes[choice % len(prefixes)], text)
    garden.tree.check()
    return garden


@settings(max_examples=300)
@given(GROWTH, st.binary(max_size=16).map(lambda data: bytes(97 + byte % 3 for byte in data)))
def test_longest_match(steps: list[tuple[int, bytes]], text: bytes) -> None:
    """No stored prefix shares more bytes than the match, which is a path from the root with only its last node in part."""
    garden = grown(steps)
    path = garden.tree.match(text)
    assert sum(step.matched_bytes for step in path) == garden.longest(text)
    above: Node | None = None
    for step in path:
        assert step.node.parent is above
        above = step.node
    assert all(step.matched_bytes == len(step.node.text) for step in path[:-1])


@given(GROWTH)
def test_every_stored_prefix_is_found_whole(steps: list[tuple[int, bytes]]) -> None:
    """The match of a stored prefix ends at its own node, even where others share all of its bytes."""
    garden = grown(steps)
    for prefix, node in garden.nodes.items():
        last = garden.tree.match(prefix)[-1]
        assert last.matched_bytes == len(last.node.text)
        assert last.node is node


@given(GROWTH, st.integers(0, 30), st.binary(max_size=5).map(lambda data: bytes(97 + byte % 2 for byte in data)))
def test_plan_of_a_save(steps: list[tuple[int, bytes]], choice: int, more: bytes) -> None:
    """A save finds the longest chain of whole nodes along its tokens, or the node that it ends in."""
    garden = grown(steps)
    prefixes = [b"", *garden.nodes]
    text = prefixes[choice % len(prefixes)] + more
    chain, beyond = garden.tree.stored(keys.pack_u32(text), text)
    end = b"".join(node.text for node in chain)
    assert text.startswith(end)
    if beyond is not None:
        assert (end + beyond.text).startswith(text)
        assert len(end + beyond.text) > len(text)
    else:
        assert len(end) == max((len(p) for p in garden.nodes if text.startswith(p)), default=0)


def test_plan_needs_equal_tokens() -> None:
    """Nodes with the same bytes and other tokens are not part of a save's chain."""
    garden = Garden()
    garden.grow(b"", b"ab")
    assert garden.tree.stored(keys.pack_u32([500]), b"ab") == ([], None)
    assert len(garden.tree.stored(keys.pack_u32(b"ab"), b"ab")[0]) == 1


def test_plan_of_one_server() -> None:
    """With a server named, the chain ends where that one has no copy."""
    garden = Garden()
    garden.grow(b"", b"ab")
    garden.grow(b"ab", b"cd")
    other = row(b"", b"ab", server="tier:ram").location
    garden.nodes[b"ab"].copies["tier:ram"] = other
    assert len(garden.tree.stored(keys.pack_u32(b"abcd"), b"abcd", "tier:ram")[0]) == 1
    assert len(garden.tree.stored(keys.pack_u32(b"abcd"), b"abcd")[0]) == 2


def test_sentence_in_words() -> None:
    """A stored beginning is matched with all its bytes, the longer of two wins, and a stranger matches nothing."""
    garden = Garden()
    assert garden.tree.match(b"the quick") == []
    garden.grow(b"", b"the quick brown")
    [step] = garden.tree.match(b"the quick brown fox jumps")
    assert step.matched_bytes == 15
    garden.grow(b"", b"the quick")
    assert garden.tree.match(b"the quick brown fox jumps")[-1].node is garden.nodes[b"the quick brown"]
    assert garden.tree.match(b"different text") == []


def test_many_siblings_do_not_hide_a_prefix() -> None:
    """A short node is found behind any number of neighbours that share its beginning."""
    garden = Garden()
    garden.grow(b"", b"a")
    for number in range(50):
        garden.grow(b"", b"ab%02d" % number)
    garden.grow(b"a", b"b99 and on")
    assert garden.tree.match(b"ab99 and on")[-1].node is garden.nodes[b"ab99 and on"]


def test_depth_is_no_limit() -> None:
    """A chain far deeper than Python's recursion limit is matched, planned and walked."""
    garden, text = Garden(), b""
    for number in range(3000):
        garden.grow(text, b"%04d" % number)
        text += b"%04d" % number
    assert len(garden.tree.match(text)) == 3000
    assert len(garden.tree.stored(keys.pack_u32(text), text)[0]) == 3000
    assert sum(1 for _ in garden.tree.roots[0].subtree()) == 3000


@pytest.mark.parametrize(
    ("stored", "parent"),
    [
        (row(b"", b"cd", space=OTHER), b""),  # another namespace's key
        (row(b"xy", b"cd"), b"ab"),  # another prefix
        (row(b"a", b"cd"), b"ab"),  # starts where its parent does not end
    ],
)
def test_a_key_has_to_follow(stored: StoredRow, parent: bytes) -> None:
    """A node whose key is not that of its prefix is refused, and leaves no trace."""
    garden = Garden()
    garden.grow(b"", b"ab")
    with pytest.raises(BadKey):
        garden.tree.attach(node_of(stored), garden.nodes.get(parent))
    garden.tree.check()
    assert [one.text for one in garden.tree.roots] == [b"ab"]


def test_namespaces_share_nothing() -> None:
    """Trees of two namespaces give the same bytes different keys."""
    other = Namespace(OTHER.fingerprint, OTHER.quant, OTHER.ctx_params_hash)
    assert key(b"ab", other) != key(b"ab")


@given(st.binary(max_size=40), st.binary(max_size=40), st.integers(0, 10))
def test_common_bytes(a: bytes, b: bytes, at: int) -> None:
    """The common prefix is as long as comparing byte by byte says."""
    at = min(at, len(b))
    want = 0
    while want < min(len(a), len(b) - at) and a[want] == b[at + want]:
        want += 1
    assert common_bytes(a, b, at) == want
