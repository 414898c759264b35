"""The real index with real tiers: what it finds, protects, promises and remembers, and what deaths leave behind."""

import contextlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from barrel_inference import protocol
from barrel_inference.errors import InvalidArgument, NotFound
from barrel_inference.protocol import (
    AddMark,
    CheckIn,
    Dump,
    DumpRow,
    DumpRows,
    Evict,
    Evicted,
    Grant,
    Grants,
    Location,
    Lookup,
    Match,
    NewNode,
    Ok,
    Publish,
    Reserve,
    SaveReason,
)
from barrel_inference.tiers import key as keys
from barrel_inference.tiers import kvc
from barrel_inference.tiers.arena import Mapping
from tests.process.harness import Caller, Tree
from tests.process.tier_harness import small_file_system
from tests.unit.cache_rows import SPACE, key, new

TIER = "barrel_inference.tiers.tier"
INDEX = "barrel_inference.workers.index"
QUOTA_BYTES = 1 << 20
RAM, DISK = "tier:ram", "tier:disk"


class Cache:
    """An index, a RAM and a disk tier, and a model that saves and looks up."""

    def __init__(self, root: str, quota_bytes: int = QUOTA_BYTES) -> None:
        tiers = {
            "ram": {"kind": "ram", "enabled": True, "quota_bytes": quota_bytes, "root": ""},
            "disk": {"kind": "disk", "enabled": True, "quota_bytes": quota_bytes, "root": root},
        }
        self.tree = Tree({"tiers": tiers})
        self.boots = {
            f"tier:{name}": {"kind": tier["kind"], "name": name, "root": tier["root"]} for name, tier in tiers.items()
        }
        self.model = Caller(self.tree, "model:m")
        self.start_index()
        self.start_tier(RAM)
        self.start_tier(DISK)
        self.tree.pretend("model:m")

    def start_index(self) -> None:
        """A new index; it serves before any tier has reported."""
        self.tree.start(INDEX, "index")

    def start_tier(self, server: str) -> None:
        """A tier whose rows the index has heard."""
        self.tree.start(TIER, server, self.boots[server])
        self.reported(server)

    def reconfigure(self, server: str, quota_bytes: int) -> None:
        """Another quota for one tier, told to its process as a reload does."""
        self.tree.settings["tiers"][server.removeprefix("tier:")]["quota_bytes"] = quota_bytes
        self.tree.tell(server, protocol.Reconfigured(settings=self.tree.settings | {"log": {"level": "error"}}))
        self.tree.until(
            lambda: quota_bytes in [tier.quota_bytes for tier in self.stats().tiers if tier.server == server]
        )

    def reported(self, server: str) -> None:
        """Wait for a tier's replay."""
        self.tree.until(lambda: any(tier.server == server and tier.up and not tier.note for tier in self.stats().tiers))

    def reserve(self, *nodes: NewNode, server: str = DISK) -> list[Grant]:
        """Room for nodes; the sizes are those of their images."""
        sized = [replace(node, size_bytes=len(image(node))) for node in nodes]
        message = Reserve(namespace=SPACE, model_id="m", server=server, nodes=sized)
        return self.model.call("index", message, Grants).grants

    def write(self, node: NewNode, location: Location) -> None:
        """The image, where it was promised a place."""
        data = image(node)
        if location.name:
            Path(str(self.boots[DISK]["root"]), location.name).write_bytes(data)
            return
        attached = Mapping.attach(self.tree.runtime_dir / f"{RAM}.arena", self.tree.children[RAM].incarnation)
        attached.view(location.offset, len(data))[:] = data

    def publish(self, grant: Grant) -> None:
        """Say that the bytes are there."""
        assert grant.location is not None
        self.model.call("index", Publish(token=grant.token, location=grant.location), Ok)

    def save(self, *nodes: NewNode, server: str = DISK) -> list[Grant]:
        """Reserve, write and publish."""
        grants = self.reserve(*nodes, server=server)
        for node, grant in zip(nodes, grants, strict=True):
            assert grant.status == "granted"
            assert grant.location is not None
            self.write(node, grant.location)
            self.publish(grant)
        return grants

    def look(self, text: bytes, parent: bytes | None = None, wait_ms: int = 0) -> Match:
        """A lookup, whose claim stays open."""
        parent_key = key(parent) if parent is not None else None
        return self.model.call("index", lookup_of(text, parent_key, wait_ms), Match)

    def rows(self) -> list[DumpRow]:
        """Every row."""
        return self.model.call("index", Dump(), DumpRows).rows

    def stats(self) -> protocol.CacheStatsReply:
        """The tiers' accounts."""
        return self.model.call("index", protocol.CacheStats(), protocol.CacheStatsReply)

    def counter(self, name: str) -> int:
        """One counter."""
        return self.model.call("index", protocol.Counters(), protocol.CounterValues).counters[name]

    def evict(self, size_bytes: int | None = None, tiers: list[str] | None = None) -> Evicted:
        """Free room."""
        return self.model.call("index", Evict(bytes=size_bytes, tiers=tiers), Evicted)

    def reserved_bytes(self, server: str) -> int:
        """Bytes that are promised and not filled."""
        return next(tier.reserved_bytes for tier in self.stats().tiers if tier.server == server)


def lookup_of(text: bytes, parent_key: bytes | None = None, wait_ms: int = 0) -> Lookup:
    """The message."""
    return Lookup(namespace=SPACE, model_id="m", text=text, parent_key=parent_key, wait_ms=wait_ms)


def image(node: NewNode) -> bytes:
    """The complete image of a node, with a small payload."""
    meta = kvc.Meta(
        SPACE, "m", node.key, node.parent_key, node.start_tokens, node.token_ids, node.token_bytes, node.text, node.reason,
        snapshot=False, pinned=node.pinned, created_unix_s=1.0,
    )  # fmt: skip
    layout = kvc.layout(meta, 64, 0)
    data = bytearray(layout.size_bytes)
    kvc.seal(memoryview(data), meta, layout)
    return bytes(data)


IMAGE_BYTES = len(image(new(b"", b"ab")))


@pytest.fixture
def root() -> Iterator[str]:
    """A disk tier's root, on tmpfs to be quick."""
    above = tempfile.mkdtemp(dir="/dev/shm")
    yield f"{above}/kvc"
    shutil.rmtree(above)


@pytest.fixture
def cache(root: str) -> Iterator[Cache]:
    """Index, tiers and model, with room for many rows."""
    cache = Cache(root)
    yield cache
    cache.tree.close()


@pytest.mark.parametrize("server", [RAM, DISK])
def test_save_and_find(cache: Cache, server: str) -> None:
    """What was published is found with its place, its row is available, and the counters have moved."""
    assert cache.look(b"abcd").miss_reason == "no_entry"
    cache.save(new(b"", b"ab"), new(b"ab", b"cd"), server=server)
    match = cache.look(b"abcdef")
    assert (match.via, match.divergence_byte, [node.matched_bytes for node in match.nodes]) == ("longest", 4, [2, 2])
    assert all(copy.server == server for node in match.nodes for copy in node.copies)
    assert {(row.tokens, row.status) for row in cache.rows()} == {(2, "available"), (4, "available")}
    assert cache.counter("saves_cold") == 1
    assert cache.counter(f"bytes_{server.removeprefix('tier:')}") == sum(row.size_bytes for row in cache.rows())


def test_counters_start_at_zero(cache: Cache) -> None:
    """Every counter of the public list is there from the start; what others count is added, and unknown names are not."""
    counters = cache.model.call("index", protocol.Counters(), protocol.CounterValues).counters
    assert len(counters) >= 30
    assert set(counters.values()) == {0}
    for delta in (1234, 5678):
        cache.model.cast("index", protocol.Counted(deltas={"hits_exact": delta, "no such": 1}))
    assert cache.counter("hits_exact") == 6912
    assert "no such" not in cache.model.call("index", protocol.Counters(), protocol.CounterValues).counters


def test_a_reserved_row_is_writing(cache: Cache) -> None:
    """Between promise and publication a row is `writing`: not found, not evicted, not promised twice."""
    node = new(b"", b"ab")
    [grant] = cache.reserve(node)
    assert [row.status for row in cache.rows()] == ["writing"]
    assert cache.look(b"ab").nodes == []
    assert cache.evict().rows == 0
    assert [one.status for one in cache.reserve(node)] == ["conflict"]
    assert grant.location is not None
    cache.write(node, grant.location)
    cache.publish(grant)
    assert [one.status for one in cache.reserve(node)] == ["already_present"]
    assert cache.counter("duplicate_dropped") == 2


def test_a_claim_protects_until_check_in(cache: Cache) -> None:
    """A looked-up row survives a collection; checked in it has a hit and can go."""
    cache.save(new(b"", b"ab"))
    match = cache.look(b"ab")
    assert [row.refcount for row in cache.rows()] == [1]
    assert cache.evict() == Evicted(rows=0, bytes=0)
    cache.model.cast("index", CheckIn(claim=match.claim, used_keys=[key(b"ab")]))
    assert [(row.refcount, row.hits) for row in cache.rows()] == [(0, 1)]
    assert cache.evict() == Evicted(rows=1, bytes=IMAGE_BYTES)
    assert cache.counter("evictions") == 1
    assert list(Path(str(cache.boots[DISK]["root"])).rglob("*.kvc")) == []


def test_the_dead_let_go(cache: Cache) -> None:
    """A model that dies leaves no claim and no reservation in memory behind."""
    cache.save(new(b"", b"ab"))
    cache.look(b"ab")
    cache.reserve(new(b"", b"xy"), server=RAM)
    assert cache.reserved_bytes(RAM) > 0
    cache.tree.bury("model:m")
    cache.tree.until(lambda: cache.reserved_bytes(RAM) == 0 and [row.refcount for row in cache.rows()] == [0])


def test_a_dead_models_writes(cache: Cache) -> None:
    """After a model's death what a writer has is still promised, as long as that one lives; all else is given back soon."""
    grants = [cache.reserve(new(b"", text))[0] for text in (b"ab", b"cd", b"ef", b"gh")]
    assert cache.reserved_bytes(DISK) == 4 * IMAGE_BYTES
    for name in ("writer:0", "writer:1"):
        cache.tree.pretend(name)
    for grant, name in ((grants[0], "writer:0"), (grants[1], "writer:1")):
        cache.model.cast("index", protocol.Handed(token=grant.token, writer=name))
    cache.rows()  # the casts have arrived
    cache.tree.bury("model:m")
    cache.model.cast("index", protocol.Handed(token=grants[2].token, writer="writer:0"))  # it was on its way
    cache.tree.until(lambda: cache.reserved_bytes(DISK) == 3 * IMAGE_BYTES)
    cache.tree.bury("writer:1")
    cache.tree.until(lambda: cache.reserved_bytes(DISK) == 2 * IMAGE_BYTES)
    for grant, text in ((grants[0], b"ab"), (grants[2], b"ef")):
        cache.model.call("index", protocol.CheckReservation(token=grant.token), Ok)
        assert grant.location is not None
        cache.write(new(b"", text), grant.location)
        cache.publish(grant)
        assert cache.look(text).via == "exact"
    assert cache.reserved_bytes(DISK) == 0


def test_a_lookup_waits_for_its_parent(cache: Cache) -> None:
    """A lookup whose parent is being written hears of it as soon as it is published, and not before."""
    node = new(b"", b"ab")
    [grant] = cache.reserve(node)
    assert cache.look(b"abcd", parent=b"ab", wait_ms=1).nodes == []
    waiting = cache.model.ask("index", lookup_of(b"abcd", key(b"ab"), 20_000))
    assert grant.location is not None
    cache.write(node, grant.location)
    cache.publish(grant)
    match = cache.model.answer("index", waiting, Match)
    assert (match.via, match.parent_tokens) == ("parent", 2)


def test_no_wait_for_what_is_live(cache: Cache) -> None:
    """A lookup whose caller has as much of the prompt as the parent's save will hold is answered at once."""
    cache.reserve(new(b"", b"ab"))
    message = replace(lookup_of(b"abcd", key(b"ab"), 10**7), live_tokens=2)
    assert cache.model.call("index", message, Match).nodes == []


def test_an_abort_wakes_who_waits(cache: Cache) -> None:
    """When the save of a parent is given up, who waits for it is answered at once; a failed save is counted."""
    [grant] = cache.reserve(new(b"", b"ab"))
    waiting = cache.model.ask("index", lookup_of(b"abcd", key(b"ab"), 20_000))
    cache.model.cast("index", protocol.Abort(tokens=[grant.token], reason="failed"))
    assert cache.model.answer("index", waiting, Match).nodes == []
    assert cache.counter("saves_dropped") == 1
    assert cache.reserved_bytes(DISK) == 0
    with pytest.raises(NotFound):
        cache.model.call("index", protocol.CheckReservation(token=grant.token), Ok)


@pytest.mark.parametrize("server", [RAM, DISK])
def test_quota_holds(root: str, server: str) -> None:
    """With room for three rows, five saves leave three, and the tier's bytes are those of the index."""
    cache = Cache(root, quota_bytes=3 * IMAGE_BYTES + 100)
    try:
        for text in (b"ab", b"cd", b"ef", b"gh", b"ij"):
            cache.save(new(b"", text), server=server)
            assert sum(row.size_bytes for row in cache.rows()) <= 3 * IMAGE_BYTES
        assert len(cache.rows()) == 3
        assert cache.counter("evictions") == 2
        assert cache.look(b"ij").via == "exact"
        assert cache.look(b"ab").nodes == []
    finally:
        cache.tree.close()


@pytest.mark.parametrize("server", [RAM, DISK])
def test_quota_changes_while_rows_are_there(root: str, server: str) -> None:
    """A smaller quota evicts the oldest rows down to it, a larger one takes more, and a tier that dies comes back with it."""
    cache = Cache(root, quota_bytes=4 * IMAGE_BYTES)
    try:
        for text in (b"ab", b"cd", b"ef", b"gh"):
            cache.save(new(b"", text), server=server)
        cache.reconfigure(server, 2 * IMAGE_BYTES)
        assert [cache.look(text).via for text in (b"ab", b"cd", b"ef", b"gh")] == ["none", "none", "exact", "exact"]
        assert cache.counter("evictions") == 2
        cache.reconfigure(server, 5 * IMAGE_BYTES)
        for text in (b"ij", b"kl", b"mn"):
            cache.save(new(b"", text), server=server)
        assert len(cache.rows()) == 5
        cache.tree.kill(server)
        cache.start_tier(server)
        assert [tier.quota_bytes for tier in cache.stats().tiers if tier.server == server] == [5 * IMAGE_BYTES]
    finally:
        cache.tree.close()


def test_too_large_is_left_off_and_counted(root: str) -> None:
    """What does not fit the quota gets no place; the save's beginning is kept, and it counts as dropped once."""
    cache = Cache(root, quota_bytes=2 * IMAGE_BYTES + 100)
    try:
        grants = cache.reserve(*(new(b"abcd"[:n], b"abcd"[n : n + 1]) for n in range(4)))
        assert [grant.status for grant in grants] == ["granted", "granted", "no_space", "no_parent"]
        assert cache.counter("saves_dropped") == 1
    finally:
        cache.tree.close()


def test_a_corrupt_copy_goes_and_can_be_saved_again(cache: Cache) -> None:
    """A copy that was reported unreadable is dropped with its file and counted; the same row can be saved again."""
    cache.save(new(b"", b"ab"))
    match = cache.look(b"ab")
    cache.model.cast("index", CheckIn(claim=match.claim, corrupt=[(key(b"ab"), DISK)]))
    assert cache.look(b"ab").nodes == []
    assert cache.counter("corrupt_files") == 1
    cache.save(new(b"", b"ab"))
    assert cache.look(b"ab").via == "exact"
    assert cache.evict().rows == 0  # claimed


def test_marks_and_pins(cache: Cache) -> None:
    """A mark is found as an exact prompt and counted as a row; a pinned one keeps its node through collections."""
    cache.save(new(b"", b"abcd"))
    mark = AddMark(
        namespace=SPACE, key=key(b"ab"), node_key=key(b"abcd"), tokens=2, reason=SaveReason.AGENT_PREFIX, pinned=True
    )
    for _ in range(2):
        cache.model.call("index", mark, Ok)
    assert cache.counter("saves_agent_prefix") == 1
    assert {(row.tokens, row.reason, row.pinned) for row in cache.rows()} == {
        (4, "cold", True),
        (2, "agent_prefix", True),
    }
    assert cache.evict().rows == 0
    assert cache.look(b"ab").via == "exact"


def test_an_index_that_comes_back(cache: Cache) -> None:
    """A new index hears everything from the tiers: rows, hits, marks and pins."""
    cache.save(new(b"", b"abcd"))
    cache.save(new(b"", b"wxyz"), server=RAM)
    mark = AddMark(namespace=SPACE, key=key(b"ab"), node_key=key(b"abcd"), tokens=2, reason=SaveReason.FINISH)
    cache.model.call("index", mark, Ok)
    cache.model.cast("index", CheckIn(claim=cache.look(b"abcd").claim, used_keys=[key(b"abcd")] * 3))
    cache.rows()  # the cast has arrived
    assert cache.tree.children["index"].end(signal.SIGTERM) == 0  # tells the tiers before it ends
    del cache.tree.children["index"]
    cache.start_index()
    cache.reported(RAM)
    cache.reported(DISK)
    cache.tree.until(lambda: len(cache.rows()) == 3)
    assert cache.look(b"ab").via == "exact"
    assert cache.look(b"wxyz").via == "exact"
    assert {row.hits for row in cache.rows() if row.tier == "disk"} == {3}


@pytest.mark.parametrize("server", [RAM, DISK])
def test_a_save_outlives_the_index(cache: Cache, server: str) -> None:
    """What was promised by an index that was killed is published under the next one, and found."""
    node = new(b"", b"ab")
    [grant] = cache.reserve(node, server=server)
    assert grant.location is not None
    cache.tree.kill("index")
    cache.start_index()
    cache.write(node, grant.location)
    cache.reported(server)
    cache.model.call("index", protocol.CheckReservation(token=grant.token), Ok)
    cache.publish(grant)
    assert cache.look(b"ab").via == "exact"


def test_lookup_during_a_rebuild(cache: Cache) -> None:
    """While a tier has not reported, a miss says so instead of claiming that nothing is stored."""
    cache.save(new(b"", b"ab"))
    cache.tree.kill(DISK)
    cache.tree.kill("index")
    cache.start_index()
    assert cache.look(b"ab").miss_reason == "index_rebuilding"
    cache.start_tier(DISK)
    cache.tree.until(lambda: cache.look(b"ab").via == "exact")


def test_a_tier_that_has_not_reported(cache: Cache) -> None:
    """The accounts tell a tier that serves and has yet to say what it holds from one that is down."""
    cache.tree.kill(RAM)
    cache.tree.kill(DISK)
    cache.tree.kill("index")
    cache.tree.pretend(RAM)
    cache.start_index()
    found = {tier.server: (tier.up, tier.note) for tier in cache.stats().tiers}
    assert found == {RAM: (True, "has not reported its rows yet"), DISK: (False, "is not running")}


def test_a_tier_that_comes_back(cache: Cache) -> None:
    """A dead file tier's rows are gone at once and all back with it; a dead memory tier's are gone for good."""
    cache.save(new(b"", b"ab"))
    cache.save(new(b"", b"cd"), server=RAM)
    cache.tree.kill(DISK)
    cache.tree.kill(RAM)
    cache.tree.until(lambda: cache.rows() == [])
    assert [grant.status for grant in cache.reserve(new(b"", b"ef"))] == ["tier_down"]
    assert [tier.up for tier in cache.stats().tiers] == [False, False]
    cache.start_tier(RAM)
    cache.start_tier(DISK)
    cache.tree.until(lambda: [row.tier for row in cache.rows()] == ["disk"])
    assert cache.look(b"ab").via == "exact"


def test_a_slow_tier_stops_nobody(cache: Cache) -> None:
    """While a tier does not answer, the index answers everybody else, and reservations elsewhere go on."""
    cache.save(new(b"", b"ab"), server=RAM)
    disk = cache.tree.children[DISK].process
    disk.send_signal(signal.SIGSTOP)
    waiting = cache.model.ask("index", Reserve(namespace=SPACE, model_id="m", server=DISK, nodes=[new(b"", b"xy")]))
    assert cache.look(b"ab").via == "exact"
    cache.save(new(b"", b"cd"), server=RAM)
    disk.send_signal(signal.SIGCONT)
    assert [grant.status for grant in cache.model.answer("index", waiting, Grants).grants] == ["granted"]


def test_nobody_hears_a_late_grant(cache: Cache) -> None:
    """Room that is granted after its caller stopped waiting is given back: the same nodes can be reserved again."""
    disk = cache.tree.children[DISK].process
    disk.send_signal(signal.SIGSTOP)
    message = Reserve(namespace=SPACE, model_id="m", server=DISK, nodes=[new(b"", b"ab", size_bytes=IMAGE_BYTES)])
    late = cache.model.ask("index", message, deadline_ms=1)
    cache.rows()  # answered after the call above arrived
    disk.send_signal(signal.SIGCONT)
    assert cache.model.answer("index", late, Grants).grants[0].status != "granted"
    assert cache.reserved_bytes(DISK) == 0
    cache.save(new(b"", b"ab"))


def test_bad_requests_are_refused(cache: Cache) -> None:
    """Unknown tiers, unknown marks and unknown tokens are typed errors; bad keys are answers; the index lives on."""
    with pytest.raises(InvalidArgument, match="floppy"):
        cache.evict(tiers=["floppy"])
    with pytest.raises(InvalidArgument, match="floppy"):
        cache.model.call("index", Dump(tier="floppy"), DumpRows)
    with pytest.raises(NotFound):
        cache.model.call(
            "index", AddMark(namespace=SPACE, key=key(b"a"), node_key=key(b"b"), tokens=1, reason=SaveReason.FINISH), Ok
        )
    with pytest.raises(NotFound):
        cache.model.call("index", Publish(token=1, location=Location("tier:none", 1, 1)), Ok)
    forged = replace(new(b"", b"ab"), token_bytes=keys.pack_u32([1]))
    assert [grant.status for grant in cache.reserve(forged)] == ["bad_key"]
    assert cache.look(b"ab").miss_reason == "no_entry"


def test_a_medium_that_others_fill(tmp_path: Path) -> None:
    """When the file system has less than the quota says, own rows make room for new ones; when it takes nothing, they stay.

    Bytes that cannot be deleted are not counted as freed.
    """
    with small_file_system(tmp_path) as small:
        cache = Cache(f"{small}/kvc")
        try:
            for text in (b"ab", b"cd", b"ef", b"gh"):
                cache.save(new(b"", text))
            with contextlib.suppress(OSError), Path(small, "filler").open("wb", buffering=0) as filler:
                while filler.write(bytes(4096)):
                    pass
            cache.save(new(b"", b"ij"))
            assert cache.look(b"ij").via == "exact"
            gone = cache.counter("evictions")
            assert 1 <= gone < 4
            assert len(cache.rows()) == 5 - gone
            subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
            assert [grant.status for grant in cache.reserve(new(b"", b"kl"))] == ["no_space"]
            assert cache.counter("evictions") == gone
            assert cache.evict() == Evicted(rows=4 - gone, bytes=0)  # the row that was looked up is claimed
        finally:
            cache.tree.close()
