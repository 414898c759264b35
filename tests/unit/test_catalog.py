"""What the index decides: lookups, claims, reservations, eviction, replays, and that its books are right after anything."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from barrel_inference.protocol import Location, Namespace, NewNode, SaveReason, StoredRow, Tier
from barrel_inference.tiers import key as keys
from barrel_inference.tiers.catalog import Catalog
from barrel_inference.tiers.prefix_tree import Mark
from barrel_inference.tiers.reservations import Reservation
from barrel_inference.tiers.stored import Changes
from tests.unit.cache_rows import DISK, OTHER, RAM, SPACE, key, new, row

QUOTA = 100


def catalog_of(*rows: StoredRow, quota_bytes: int = QUOTA) -> Catalog:
    """A catalog of a RAM and a disk tier with these rows."""
    catalog = Catalog()
    catalog.stored.open_tier(RAM, Tier.RAM, quota_bytes, 1, "")
    catalog.stored.open_tier(DISK, Tier.DISK, quota_bytes, 1, "")
    for one in rows:
        assert not catalog.restore_row(one, 0.0).deletes
    catalog.check()
    return catalog


def promise(
    catalog: Catalog, nodes: Sequence[NewNode], *, server: str = DISK, now_s: float = 0.0, owner: str = "model:m",
    space: Namespace = SPACE,
) -> tuple[list[str], list[Reservation], Changes]:  # fmt: skip
    """Reserve as the index does: judge, make room, note; places as the tier would give them."""
    statuses, made, changes = [], [], Changes()
    for number, node in enumerate(nodes):
        status, digest = catalog.judge(space, node, server)
        if digest is not None:
            spare = frozenset({node.parent_key}) if node.parent_key else frozenset()
            fits, more = catalog.make_room(server, node.size_bytes, now_s, spare)
            changes.add(more)
            status = "granted" if fits else "no_space"
            if fits:
                token = catalog.reservations.new_token()
                made.append(
                    Reservation(
                        token, space, "m", node, server, owner, 1, number == len(nodes) - 1, digest,
                        location=Location(server, 1, node.size_bytes, token, ""),
                    )
                )  # fmt: skip
                catalog.reserve(made[-1])
        statuses.append(status)
    catalog.check()
    return statuses, made, changes


def publish(catalog: Catalog, reservation: Reservation, now_s: float = 0.0) -> Changes:
    """The bytes are there."""
    assert reservation.location is not None
    changes = catalog.publish(reservation, reservation.location, now_s)
    catalog.check()
    return changes


def matched(catalog: Catalog, text: bytes, parent: bytes | None = None, space: Namespace = SPACE) -> tuple[int, str]:
    """Bytes matched, and how."""
    found = catalog.lookup(space, text, key(parent, space) if parent is not None else None)
    return sum(step.matched_bytes for step in found.steps), found.via


# --- lookup


def test_empty_index_misses() -> None:
    """Without a row there is no entry to differ from."""
    found = catalog_of().lookup(SPACE, b"abc", None)
    assert (found.via, found.miss_reason, found.divergence_byte) == ("none", "no_entry", None)


def test_stranger_diverges_at_once() -> None:
    """A prompt that shares nothing is told so, at byte 0."""
    found = catalog_of(row(b"", b"abc")).lookup(SPACE, b"xyz", None)
    assert (found.via, found.miss_reason, found.divergence_byte) == ("none", "diverged", 0)


@pytest.mark.parametrize(
    ("text", "parent", "bytes_matched", "via", "divergence"),
    [
        (b"abcdef", None, 6, "exact", None),  # a node's end
        (b"abcde", None, 5, "exact", None),  # a mark
        (b"abcd", None, 4, "longest", None),  # all of it, but nobody named this point
        (b"abcdefgh", None, 6, "longest", 6),
        (b"abcxyz", b"abc", 3, "parent", 3),
        (b"abcdxyz", b"abc", 4, "longest", 4),  # deeper than the parent by a whole token
        (b"abcdexyz", b"abcde", 5, "parent", 5),  # the parent is a mark
        (b"abcxyz", b"abcdef", 3, "longest", 3),  # the parent is no prefix of the prompt
        (b"abcxyz", b"never stored", 3, "longest", 3),
        (b"abc", b"abc", 3, "exact", None),
    ],
)
def test_how_it_was_found(
    text: bytes, parent: bytes | None, bytes_matched: int, via: str, divergence: int | None
) -> None:
    """A whole named prompt is exact, one that goes on from its parent is via parent, anything else the longest prefix."""
    mark = (key(b"abcde"), 5, "finish", False)
    catalog = catalog_of(row(b"", b"abc"), row(b"abc", b"def", marks=[mark]))
    assert matched(catalog, text, parent) == (bytes_matched, via)
    assert catalog.lookup(SPACE, text, None).divergence_byte == divergence


def test_namespaces_never_meet() -> None:
    """A row of one namespace is no match in another, whatever its bytes."""
    catalog = catalog_of(row(b"", b"abc", space=OTHER))
    assert matched(catalog, b"abc") == (0, "none")
    assert matched(catalog, b"abc", space=OTHER) == (3, "exact")


def test_copies_fastest_first() -> None:
    """A node in two tiers is offered from memory first."""
    catalog = catalog_of(row(b"", b"abc"), row(b"", b"abc", server=RAM))
    [node] = catalog.wire_nodes(catalog.lookup(SPACE, b"abc", None))
    assert [copy.server for copy in node.copies] == [RAM, DISK]


def test_unknown_parent_moves_no_hits() -> None:
    """A parent whose bytes are no prefix is not used: neither its hits nor its recency move."""
    catalog = catalog_of(row(b"", b"xyz", hits=3))
    catalog.lookup(SPACE, b"abc", key(b"xyz"))
    assert catalog.stored.nodes[key(b"xyz")].hits == 3


# --- claims and hits


def test_claims_protect_and_end() -> None:
    """Two holders make two; each check-in takes one; an unknown one is fine; the dead let go of theirs."""
    catalog = catalog_of(row(b"", b"abc"))
    node = catalog.stored.nodes[key(b"abc")]
    steps = catalog.lookup(SPACE, b"abc", None).steps
    first, _second, third = (catalog.claim("model:m", n, steps) for n in (1, 1, 2))
    assert node.claims == 3
    assert catalog.evict([DISK], None, 0.0).evicted == 0
    catalog.release(first)
    catalog.release(first)
    assert node.claims == 2
    catalog.release_owner("model:m", 1)
    assert node.claims == 1
    catalog.release(third)
    assert catalog.evict([DISK], None, 0.0).evicted == 1
    catalog.check()


def test_hits_are_uses() -> None:
    """Two restores make two hits; stored hits are where they were."""
    catalog = catalog_of(row(b"", b"abc", hits=7, used_s=50.0))
    for _ in range(2):
        catalog.used(key(b"abc"), 50.0)
    assert catalog.stored.nodes[key(b"abc")].hits == 9
    assert key(b"abc") in catalog.stored.touched


# --- reservations


def test_reserve_publish_find() -> None:
    """A reserved node is not found; published it is; its save counts once, at the last node."""
    catalog = catalog_of()
    statuses, (a, b), _ = promise(catalog, [new(b"", b"ab"), new(b"ab", b"cd")])
    assert statuses == ["granted", "granted"]
    assert matched(catalog, b"abcd") == (0, "none")
    assert publish(catalog, a).saved == []
    assert publish(catalog, b).saved == [SaveReason.COLD]
    assert matched(catalog, b"abcd") == (4, "exact")


def test_children_wait_for_parents() -> None:
    """Nodes that are complete before their parents join when those do, in whatever order."""
    catalog = catalog_of()
    _, made, _ = promise(catalog, [new(b"abcd"[:n], b"abcde"[n : n + 1]) for n in range(5)])
    for reservation in reversed(made[1:]):
        assert publish(catalog, reservation).committed == []
    assert len(publish(catalog, made[0]).committed) == 5
    assert matched(catalog, b"abcde") == (5, "exact")


def test_an_abort_takes_what_hangs_below() -> None:
    """When a parent is given up, what was reserved below it is given back too, complete or not."""
    catalog = catalog_of()
    _, (a, b, c), _ = promise(catalog, [new(b"", b"ab"), new(b"ab", b"c"), new(b"abc", b"d")])
    publish(catalog, b)
    changes = catalog.abort(a.token)
    assert set(changes.frees) == {a.location, b.location, c.location}
    assert set(changes.settled) == {a.node.key, b.node.key, c.node.key}
    catalog.check()
    assert catalog.stored.accounts[DISK].reserved_bytes == 0


@pytest.mark.parametrize(
    ("node", "status"),
    [
        (new(b"", b"ab"), "already_present"),
        (new(b"", b"x"), "conflict"),
        (new(b"ab", b"c"), "granted"),
        (new(b"x", b"y"), "granted"),  # below one that is being written
        (new(b"zz", b"c"), "no_parent"),
        (new(b"ab", b"c", space=OTHER), "no_parent"),
        (replace(new(b"ab", b"c"), key=key(b"other")), "bad_key"),
        (replace(new(b"ab", b"c"), token_bytes=keys.pack_u32([2])), "bad_key"),
        (replace(new(b"ab", b"c"), token_ids=b"123"), "bad_key"),
        (new(b"ab", b"c", size_bytes=QUOTA + 1), "no_space"),
    ],
)  # fmt: skip
def test_judgement(node: NewNode, status: str) -> None:
    """Each node gets the answer that fits it; keys are checked, not believed."""
    catalog = catalog_of(row(b"", b"ab"))
    promise(catalog, [new(b"", b"x")])
    assert promise(catalog, [node])[0] == [status]


def test_a_second_tier_gets_its_own_copy() -> None:
    """What another tier holds can be saved here too, and is one node with two copies; with another cut it is there already."""
    catalog = catalog_of(row(b"", b"abcd", server=RAM), row(b"", b"ab"))
    statuses, made, _ = promise(catalog, [new(b"", b"abcd")])
    assert statuses == ["granted"]
    publish(catalog, made[0])
    assert catalog.stored.nodes[key(b"abcd")].copies.keys() == {RAM, DISK}
    catalog.evict([DISK], None, 0.0)
    promise(catalog, [new(b"", b"ab")])
    assert promise(catalog, [new(b"ab", b"cd")])[0] == ["already_present"]


def test_a_row_that_a_tier_reports_keeps_the_promise() -> None:
    """A file that its tier adopts while the reservation is open takes its place; what waited below it joins."""
    catalog = catalog_of()
    _, (_a, b), _ = promise(catalog, [new(b"", b"ab"), new(b"ab", b"cd")])
    publish(catalog, b)
    changes = catalog.restore_row(row(b"", b"ab"), 0.0)
    assert key(b"ab") in changes.settled
    assert matched(catalog, b"abcd") == (4, "exact")
    catalog.check()


def test_a_copy_that_came_meanwhile_is_no_second_node() -> None:
    """A node that another tier reported while it was being written is joined, not doubled."""
    catalog = catalog_of()
    _, (a,), _ = promise(catalog, [new(b"", b"ab")], server=RAM)
    catalog.restore_row(row(b"", b"ab"), 0.0)
    publish(catalog, a)
    assert catalog.stored.nodes[key(b"ab")].copies.keys() == {RAM, DISK}
    assert len(catalog.stored.tree(SPACE).roots) == 1


def test_plan_counts_what_is_on_its_way() -> None:
    """A save goes on after nodes that another has reserved; nothing is written twice."""
    catalog = catalog_of(row(b"", b"ab"))
    promise(catalog, [new(b"ab", b"cd")])
    chain, beyond = catalog.plan(SPACE, keys.pack_u32(b"abcdef"), b"abcdef")
    assert ([one.end_tokens for one in chain], beyond) == ([2, 4], None)
    chain, _ = catalog.plan(SPACE, keys.pack_u32(b"abcdef"), b"abcdef", RAM)
    assert chain == []


def test_old_promises_expire() -> None:
    """Reservations that nobody fills are found by their age."""
    catalog = catalog_of()
    _, (a,), _ = promise(catalog, [new(b"", b"ab")])
    assert catalog.expired(0.0) == []
    assert catalog.expired(1.0) == [a]


# --- quota and eviction


def test_quota_of_three_rows() -> None:
    """Five saves into room for three leave the three latest, and the books say so."""
    catalog = catalog_of(quota_bytes=30)
    for number, text in enumerate((b"a", b"b", b"c", b"d", b"e")):
        _, (made,), changes = promise(catalog, [new(b"", text)], now_s=float(number))
        assert changes.evicted == (number >= 3)
        publish(catalog, made, float(number))
        assert catalog.stored.accounts[DISK].lacks(0) == 0
    assert {node.text for node in catalog.stored.nodes.values()} == {b"c", b"d", b"e"}


def test_a_save_does_not_eat_itself() -> None:
    """A chain longer than the quota keeps its beginning; its own ancestors are no victims."""
    catalog = catalog_of(row(b"", b"a"), quota_bytes=30)
    statuses, made, _ = promise(catalog, [new(b"abcd"[:n], b"abcd"[n : n + 1]) for n in range(1, 4)])
    assert statuses == ["granted", "granted", "no_space"]
    assert matched(catalog, b"a") == (1, "exact")
    for one in made:
        publish(catalog, one)


def test_pins_go_last_but_go() -> None:
    """Room is made from a pinned row only when nothing else is left; never by a collection."""
    catalog = catalog_of(row(b"", b"a", pinned=True, used_s=1.0), row(b"", b"b", used_s=2.0), quota_bytes=20)
    promise(catalog, [new(b"", b"c")])
    assert {node.text for node in catalog.stored.nodes.values()} == {b"a"}
    assert catalog.evict([DISK], None, 0.0).evicted == 0
    promise(catalog, [new(b"", b"d")])
    assert catalog.stored.nodes == {}


def test_evict_so_many_bytes() -> None:
    """Eviction stops as soon as enough is free, and goes on where it stopped."""
    catalog = catalog_of(*(row(b"", bytes([97 + n]), used_s=float(n)) for n in range(5)))
    changes = catalog.evict([DISK], 15, 9.0)
    assert (changes.evicted, changes.dropped_bytes) == (2, 20)
    assert catalog.evict([DISK], None, 9.0).evicted == 3
    catalog.check()


def test_one_order_for_all_tiers() -> None:
    """Eviction from several tiers takes the least valuable copy of all of them next, and nothing from the others."""
    catalog = catalog_of(row(b"", b"a", used_s=1.0), row(b"", b"c", used_s=3.0))
    for server, text, used_s in ((RAM, b"b", 2.0), (RAM, b"d", 4.0), ("tier:other", b"e", 0.0)):
        if server not in catalog.stored.accounts:
            catalog.stored.open_tier(server, Tier.RAM, 10**6, 1, "")
        catalog.restore_row(row(b"", text, used_s=used_s, server=server), 9.0)
    changes = catalog.evict([RAM, DISK], 25, 9.0)
    assert {server: len(gone) for server, gone in changes.deletes.items()} == {DISK: 2, RAM: 1}
    assert {node.text for node in catalog.stored.nodes.values()} == {b"d", b"e"}
    assert catalog.evict([RAM, DISK], 0, 9.0).evicted == 0
    catalog.check()


def test_a_chain_on_two_tiers() -> None:
    """A node whose last copy goes takes along what hangs below it elsewhere, and all of it is counted, once."""
    catalog = catalog_of(row(b"", b"a", used_s=1.0))
    catalog.restore_row(row(b"a", b"b", used_s=2.0, server=RAM), 9.0)
    changes = catalog.evict([RAM, DISK], None, 9.0)
    assert (changes.evicted, catalog.stored.nodes) == (2, {})
    catalog.check()


def test_orphans_go_when_nothing_else_is_left() -> None:
    """Rows that wait for their parent's tier are given up only if the rest is not enough."""
    catalog = catalog_of(row(b"", b"x", used_s=5.0), row(b"a", b"b", used_s=1.0))
    assert catalog.evict([DISK], 10, 9.0).deletes[DISK] != []
    assert list(catalog.stored.orphans) == [key(b"a")]
    assert catalog.evict([DISK], 10, 9.0).dropped_bytes == 10
    assert not catalog.stored.orphans
    catalog.check()


def test_writing_rows_survive_a_collection() -> None:
    """What is being written is not evicted, nor what it goes on from."""
    catalog = catalog_of(row(b"", b"a"))
    promise(catalog, [new(b"a", b"b")])
    assert catalog.evict([DISK], None, 0.0).evicted == 0


def test_losing_a_node_loses_what_is_below() -> None:
    """A corrupt inner node takes its subtree and what is being written below along, and nothing else."""
    catalog = catalog_of(row(b"", b"a"), row(b"a", b"b"), row(b"ab", b"c"), row(b"", b"x"))
    _, (pending,), _ = promise(catalog, [new(b"abc", b"d")])
    changes = catalog.lose(DISK, key(b"ab"))
    assert len(changes.deletes[DISK]) == 2
    assert changes.frees == [pending.location]
    assert catalog.stored.nodes.keys() == {key(b"a"), key(b"x")}
    catalog.check()


# --- marks and pins


def test_marks_name_real_points() -> None:
    """A mark is taken only where its key is that of the node's own bytes; again it is no new row."""
    catalog = catalog_of(row(b"", b"abcd"))
    mark = Mark(key(b"ab"), 2, SaveReason.FINISH)
    assert catalog.add_mark(key(b"abcd"), mark) is True
    assert catalog.add_mark(key(b"abcd"), mark) is False
    assert catalog.add_mark(key(b"abcd"), Mark(key(b"ab"), 3, SaveReason.FINISH)) is None
    assert catalog.add_mark(key(b"abcd"), Mark(key(b"ab"), 9, SaveReason.FINISH)) is None
    assert catalog.add_mark(key(b"nothing"), mark) is None
    assert catalog.add_mark(key(b"abcd"), Mark(key(b"abcd"), 4, SaveReason.FINISH)) is False
    catalog.check()


def test_one_pin_per_namespace() -> None:
    """A new static head releases the older one, also the one that a tier remembered."""
    catalog = catalog_of(row(b"", b"ab", pinned=True), row(b"", b"xyz"))
    assert catalog.add_mark(key(b"xyz"), Mark(key(b"xy"), 2, SaveReason.AGENT_PREFIX, True)) is True
    catalog.check()
    assert not catalog.stored.nodes[key(b"ab")].is_pinned
    assert catalog.stored.nodes[key(b"xyz")].is_pinned
    assert {key(b"ab"), key(b"xyz")} <= catalog.stored.touched


def test_marks_die_with_their_node() -> None:
    """A mark of a node that was evicted is not found any more."""
    catalog = catalog_of(row(b"", b"abc", marks=[(key(b"ab"), 2, "finish", False)]))
    assert key(b"ab") in catalog.stored.marks
    catalog.evict([DISK], None, 0.0)
    assert catalog.stored.marks == {}


# --- tiers


def test_replay_in_any_order() -> None:
    """Rows that come before their parents wait for them; a chain deeper than the recursion limit is no exception."""
    text = b"".join(b"%04d" % n for n in range(1500))
    rows = [row(text[: 4 * n], text[4 * n : 4 * n + 4], size_bytes=1) for n in range(1500)]
    catalog = catalog_of(quota_bytes=10**6)
    for one in reversed(rows):
        catalog.restore_row(one, 0.0)
    catalog.check()
    assert matched(catalog, text) == (len(text), "exact")
    assert catalog.stored.drop_orphans().deletes == {}


def test_rows_without_a_root_go_in_the_end() -> None:
    """A row whose parent nobody has is counted while it waits, and deleted when all have reported."""
    catalog = catalog_of()
    stray = row(b"ab", b"cd")
    catalog.restore_row(stray, 0.0)
    catalog.check()
    assert catalog.stored.accounts[DISK].stored_bytes == 10
    assert catalog.stored.drop_orphans().deletes == {DISK: [stray.location]}
    catalog.check()


def test_a_dead_tier_takes_its_own_copies_only() -> None:
    """What others hold below the rows of a dead tier waits, and is back when that tier is."""
    catalog = catalog_of(row(b"", b"ab", server=RAM), row(b"ab", b"cd"), row(b"", b"xy"))
    changes = catalog.close_tier(RAM)
    catalog.check()
    assert changes.deletes == {}
    assert matched(catalog, b"abcd") == (0, "none")
    assert catalog.stored.accounts[DISK].stored_bytes == 20
    catalog.stored.open_tier(RAM, Tier.RAM, QUOTA, 2, "")
    catalog.restore_row(row(b"", b"ab", server=RAM, incarnation=2), 0.0)
    assert matched(catalog, b"abcd") == (4, "exact")
    catalog.check()


def test_a_dead_tier_ends_its_reservations() -> None:
    """Whoever waits for a node on its way into a dead tier is woken; nothing is freed there."""
    catalog = catalog_of()
    _, (a,), _ = promise(catalog, [new(b"", b"ab")], server=RAM)
    changes = catalog.close_tier(RAM)
    assert (changes.settled, changes.frees) == ([a.node.key], [])
    assert catalog.reservations.by_token == {}


def test_rows_of_another_incarnation_are_ignored() -> None:
    """A location of a dead tier process is not taken in."""
    catalog = catalog_of()
    catalog.restore_row(row(b"", b"ab", incarnation=7), 0.0)
    assert catalog.stored.nodes == {}


def test_a_forged_row_is_deleted() -> None:
    """A row whose key is not that of its bytes is deleted, not served."""
    catalog = catalog_of()
    forged = row(b"", b"ab")
    changes = catalog.restore_row(replace(forged, text=b"xy"), 0.0)
    assert changes.deletes == {DISK: [forged.location]}
    catalog.check()


class AnyOrder(RuleBasedStateMachine):
    """Everything that can happen to an index, in any order, with its invariants after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.catalog = catalog_of(quota_bytes=60)
        self.now_s = 0.0
        self.claims: list[int] = []
        self.incarnations = {RAM: 1, DISK: 1}

    texts = st.text("ab", min_size=1, max_size=7).map(str.encode)
    servers = st.sampled_from([RAM, DISK])

    def open_tokens(self) -> list[int]:
        """Every promise."""
        return sorted(self.catalog.reservations.by_token)

    @rule(text=texts, server=servers, cut=st.integers(1, 4), pinned=st.booleans())
    def save(self, text: bytes, server: str, cut: int, pinned: bool) -> None:
        """A save of what is not stored there yet."""
        if server not in self.catalog.stored.accounts:
            return
        self.now_s += 1
        chain, beyond = self.catalog.plan(SPACE, keys.pack_u32(text), text, server)
        start = chain[-1].end_tokens if chain else 0
        if beyond is not None:
            self.catalog.add_mark(beyond.key, Mark(key(text), len(text), SaveReason.FINISH, pinned))
            return
        nodes = [new(text[:at], text[at : at + cut], pinned=pinned) for at in range(start, len(text), cut)]
        _, made, _ = promise(self.catalog, nodes, server=server, now_s=self.now_s)
        for one in made:
            one.location = Location(server, self.incarnations[server], 10, one.token, "")

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """One of the promises is kept."""
        if tokens := self.open_tokens():
            reservation = self.catalog.reservations.by_token[data.draw(st.sampled_from(tokens))]
            publish(self.catalog, reservation, self.now_s)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """One of the promises is given back."""
        if tokens := self.open_tokens():
            self.catalog.abort(data.draw(st.sampled_from(tokens)))

    @rule(text=texts, keep=st.booleans())
    def look(self, text: bytes, keep: bool) -> None:
        """A lookup finds a path whose bytes are the prompt's, each node with a copy; its claim may last."""
        found = self.catalog.lookup(SPACE, text, None)
        path = b"".join(step.node.text[: step.matched_bytes] for step in found.steps)
        assert text.startswith(path)
        assert all(step.node.copies for step in found.steps)
        claim = self.catalog.claim("model:m", 1, found.steps)
        if keep:
            self.claims.append(claim)
        else:
            self.catalog.release(claim)
            for step in found.steps:
                self.catalog.used(step.node.key, self.now_s)

    @rule()
    def check_in(self) -> None:
        """The oldest claim ends."""
        if self.claims:
            self.catalog.release(self.claims.pop(0))

    @rule(server=servers, size_bytes=st.one_of(st.none(), st.integers(1, 30)))
    def evict(self, server: str, size_bytes: int | None) -> None:
        """Claimed nodes outlive an eviction."""
        claimed = {node.key for claim in self.catalog.claims.values() for node in claim.nodes if server in node.copies}
        self.catalog.evict([server], size_bytes, self.now_s)
        assert claimed <= {one.key for one in self.catalog.stored.nodes.values() if server in one.copies}

    @rule(data=st.data(), server=servers)
    def lose(self, data: st.DataObject, server: str) -> None:
        """A copy is found corrupt."""
        if self.catalog.stored.nodes:
            self.catalog.lose(server, data.draw(st.sampled_from(sorted(self.catalog.stored.nodes))))

    @rule(server=servers)
    def restart_tier(self, server: str) -> None:
        """A tier dies; a file tier reports its rows again, in no particular order."""
        nodes = [node for node in self.catalog.stored.nodes.values() if server in node.copies]
        rows: list[dict[str, Any]] = [
            {
                "prefix": b"".join(above.text for above in _path(node))[: -len(node.text)],
                "text": node.text,
                "pinned": node.is_pinned,
            }
            for node in nodes
        ]
        self.catalog.close_tier(server)
        self.catalog.check()
        self.incarnations[server] += 1
        kind = Tier.RAM if server == RAM else Tier.DISK
        self.catalog.stored.open_tier(server, kind, 60, self.incarnations[server], "")
        for one in sorted(rows, key=lambda fields: key(fields["prefix"] + fields["text"])) if server == DISK else []:
            self.catalog.restore_row(row(**one, incarnation=self.incarnations[server]), self.now_s)
        self.catalog.stored.drop_orphans()

    @invariant()
    def books_are_right(self) -> None:
        """Accounts, trees, marks, pins and claims agree, and no quota is exceeded."""
        self.catalog.check()
        assert all(account.lacks(0) == 0 for account in self.catalog.stored.accounts.values())


def _path(node: Any) -> list[Any]:
    return [*_path(node.parent), node] if node is not None else []


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
