"""Which copies go first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barrel_inference.protocol import Tier
from barrel_inference.tiers.eviction import hits_now, score
from barrel_inference.tiers.prefix_tree import Node
from barrel_inference.tiers.stored import Changes, Stored
from tests.unit.cache_rows import DISK, RAM, key, row

HOUR_S = 3600.0
NOW_S = 1000 * HOUR_S


def shelf(*servers: str) -> Stored:
    """An empty store of these servers."""
    stored = Stored()
    for server in servers or (DISK,):
        stored.open_tier(server, Tier.RAM if server == RAM else Tier.DISK, 10**9, 1, "")
    return stored


def order(stored: Stored, server: str = DISK, *, pinned_last: bool = False, now_s: float = NOW_S) -> list[bytes]:
    """The ends of the nodes in the order in which they go."""
    gone = []
    for node in stored.victims[server].take(now_s, lambda _node: False, pinned_last=pinned_last):
        gone.append(node.text)
        stored.drop_copy(node, server, Changes(), now_s)
    return gone


def test_score_weighs_use_and_hits() -> None:
    """One hit is worth an hour, three are worth two; hits halve every six hours."""
    stored = shelf()
    for text, hits in ((b"a", 0), (b"b", 1), (b"c", 3)):
        stored.restore_row(row(b"", text, used_s=NOW_S, hits=hits), NOW_S)
    scores = {node.text: score(node, NOW_S) for node in stored.nodes.values()}
    assert scores[b"b"] - scores[b"a"] == HOUR_S
    assert scores[b"c"] - scores[b"a"] == 2 * HOUR_S
    assert hits_now(stored.nodes[key(b"c")], NOW_S + 6 * HOUR_S) == 1.5


def test_lowest_score_first() -> None:
    """What was used long ago goes first, unless hits make up for it."""
    stored = shelf()
    for text, age_h, hits in ((b"a", 3, 0), (b"b", 2, 0), (b"c", 4, 15), (b"d", 1, 0)):
        stored.restore_row(row(b"", text, used_s=NOW_S - age_h * HOUR_S, hits=hits), NOW_S)
    assert order(stored) == [b"a", b"b", b"d", b"c"]


@pytest.mark.parametrize("jump_s", [-1e9, -HOUR_S * 2, HOUR_S * 2, 1e9, 1e300])
def test_a_clock_that_jumps(jump_s: float) -> None:
    """Wherever the wall clock is set, each row goes once, and what is used after the jump goes last."""
    stored = shelf()
    for text, age_h, hits in ((b"a", 3, 5), (b"b", 2, 0), (b"c", 1, 0)):
        stored.restore_row(row(b"", text, used_s=NOW_S - age_h * HOUR_S, hits=hits), NOW_S)
    assert order(stored, now_s=NOW_S)[:1] == [b"b"]
    for text, age_h in ((b"b", 2), (b"c", 1), (b"a", 3)):
        stored.restore_row(row(b"", text, used_s=NOW_S - age_h * HOUR_S), NOW_S)
    now_s = NOW_S + jump_s
    stored.nodes[key(b"a")].hits, stored.nodes[key(b"a")].last_used_unix_s = 1, now_s
    assert order(stored, now_s=now_s)[-1] == b"a"


def test_a_use_moves_it_back() -> None:
    """A node that was used after it was noted waits its new turn."""
    stored = shelf()
    for text, used_s in ((b"a", NOW_S - 90), (b"b", NOW_S - 50)):
        stored.restore_row(row(b"", text, used_s=used_s), NOW_S)
    stored.nodes[key(b"a")].last_used_unix_s = NOW_S
    assert order(stored) == [b"b", b"a"]


def test_children_go_before_parents() -> None:
    """A parent is taken only after its last child on that server, however old it is."""
    stored = shelf()
    stored.restore_row(row(b"", b"a", used_s=1.0), NOW_S)
    stored.restore_row(row(b"a", b"b", used_s=NOW_S), NOW_S)
    stored.restore_row(row(b"a", b"c", used_s=NOW_S - 5), NOW_S)
    assert order(stored) == [b"c", b"b", b"a"]


def test_each_server_has_its_own_leaves() -> None:
    """A child on another server keeps nobody from going here."""
    stored = shelf(RAM, DISK)
    for server in (RAM, DISK):
        stored.restore_row(row(b"", b"a", server=server), NOW_S)
    stored.restore_row(row(b"a", b"b"), NOW_S)
    assert order(stored, RAM) == [b"a"]
    assert order(stored, DISK) == [b"b", b"a"]


def test_claimed_stays_and_pinned_goes_last() -> None:
    """A claimed node is never taken; a pinned one only when it is asked for and nothing else is left."""
    stored = shelf()
    stored.restore_row(row(b"", b"a", used_s=1.0, pinned=True), NOW_S)
    stored.restore_row(row(b"", b"b", used_s=2.0), NOW_S)
    stored.restore_row(row(b"", b"c", used_s=3.0), NOW_S)
    stored.nodes[key(b"b")].claims = 1
    assert order(stored) == [b"c"]
    assert order(stored) == []
    assert order(stored, pinned_last=True) == [b"a"]
    stored.nodes[key(b"b")].claims = 0
    assert order(stored) == [b"b"]


def test_parents_of_a_pin_follow_it() -> None:
    """When a pinned leaf had to go, what it hung from can go too."""
    stored = shelf()
    stored.restore_row(row(b"", b"a", used_s=1.0), NOW_S)
    stored.restore_row(row(b"a", b"b", used_s=2.0, pinned=True), NOW_S)
    assert order(stored) == []
    assert order(stored, pinned_last=True) == [b"b", b"a"]


def test_who_stops_early_loses_nothing() -> None:
    """A candidate that was shown and not taken is shown again next time."""
    stored = shelf()
    for text in (b"a", b"b", b"c"):
        stored.restore_row(row(b"", text, used_s=float(text[0])), NOW_S)
    for _ in range(3):
        shown = next(stored.victims[DISK].take(NOW_S, lambda _node: False))
        assert shown.text == b"a"
    assert order(stored) == [b"a", b"b", b"c"]


def test_faded_hits_count_in_a_later_order() -> None:
    """Hits that made a node precious when it was noted have faded a day later."""
    stored = shelf()
    stored.restore_row(row(b"", b"a", used_s=NOW_S - 5 * HOUR_S, hits=63), NOW_S)
    stored.restore_row(row(b"", b"b", used_s=NOW_S), NOW_S)
    later_s = NOW_S + 48 * HOUR_S
    assert order(stored, now_s=later_s) == [b"a", b"b"]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.binary(min_size=1, max_size=2), st.integers(0, 99)), max_size=20),
    st.data(),
)
def test_order_of_any_forest(steps: list[tuple[int, bytes, int]], data: st.DataObject) -> None:
    """Everything unclaimed with nothing claimed below goes, each after all of its children, and nothing else does."""
    stored = shelf()
    prefixes = [b""]
    for choice, text, used_s in steps:
        prefix = prefixes[choice % len(prefixes)]
        if key(prefix + text) not in stored.nodes:
            stored.restore_row(row(prefix, text, used_s=float(used_s)), NOW_S)
            prefixes.append(prefix + text)
    claimed = data.draw(st.sets(st.sampled_from(prefixes[1:]))) if prefixes[1:] else set()
    for prefix in claimed:
        node: Node | None = stored.nodes[key(prefix)]
        while node is not None:  # as a claim does: the whole path
            node.claims += 1
            node = node.parent
    kept = {one.key for one in stored.nodes.values() if one.claims}
    for taken in stored.victims[DISK].take(NOW_S, lambda _node: False):
        assert not taken.children
        stored.drop_copy(taken, DISK, Changes(), NOW_S)
    assert stored.nodes.keys() == kept
