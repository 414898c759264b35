"""Claims that every store meets, whether its bytes lie in an arena, on tmpfs or on disk."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from barrel_inference.protocol import Location, Namespace, SaveReason, Tier, Touch
from barrel_inference.tiers import kvc
from barrel_inference.tiers.leases import INHERITED_TTL_S, Owner
from barrel_inference.tiers.store import Scan, Stats, Store, Want
from barrel_inference.tiers.store_files import FileStore
from barrel_inference.tiers.store_memory import MemoryStore

QUOTA_BYTES = 64 * 1024
OWNER = Owner("model:tiny", 3)
META = kvc.Meta(
    namespace=Namespace(fingerprint=b"\xaa" * 32, quant="f16/16", ctx_params_hash=b"\xbb" * 32),
    model_id="tiny",
    key=bytes(32),
    parent_key=None,
    start_tokens=0,
    token_ids=b"\1\0\0\0\2\0\0\0",
    token_bytes=b"\1\0\0\0\1\0\0\0",
    text=b"ab",
    reason=SaveReason.COLD,
    snapshot=False,
    pinned=False,
    created_unix_s=1234567890.0,
)
CELLS_BYTES = 1000
SIZE_BYTES = kvc.layout(META, CELLS_BYTES, 0).size_bytes


def key_of(number: int) -> bytes:
    """The key of image `number`."""
    return bytes([number]) * 32


@dataclass
class Bench:
    """A store, and how to put bytes where it says."""

    store: Store[Any]
    write: Callable[[Location, bytes], None]

    def lease(self, number: int, owner: Owner = OWNER) -> Location | None:
        """Room for one image."""
        want = Want(key_of(number), SIZE_BYTES)
        return self.store.room(owner, [], [want], give_back=False).locations[0]

    def write_image(self, number: int, location: Location) -> None:
        """A whole image at a leased location."""
        slab = bytearray(SIZE_BYTES)
        meta = replace(META, key=key_of(number))
        kvc.seal(memoryview(slab), meta, kvc.layout(meta, CELLS_BYTES, 0))
        self.write(location, bytes(slab))

    def save(self, number: int) -> Location:
        """One row."""
        location = self.lease(number)
        assert location is not None
        self.write_image(number, location)
        assert self.store.committed(location) == Scan()
        return location

    def keys(self) -> list[bytes]:
        """Keys of all rows."""
        return sorted(row.key for row in self.store.read(self.store.places()).rows)


def plenty() -> int:
    """A machine without memory worries."""
    return 1 << 40


@pytest.fixture(params=["ram", "ram_file", "disk"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """Each kind of store."""
    if request.param == "ram":
        memory = MemoryStore("tier:ram", 5, QUOTA_BYTES, plenty)

        def write_slab(location: Location, image: bytes) -> None:
            memory.arena.view(location.offset, len(image))[:] = image

        yield Bench(memory, write_slab)
        memory.close()
        return
    kind = Tier(request.param)
    root = Path(tempfile.mkdtemp(dir="/dev/shm")) if kind is Tier.RAM_FILE else tmp_path / "kvc"
    store = FileStore(kind, f"tier:{kind}", 5, QUOTA_BYTES, root, plenty if kind is Tier.RAM_FILE else None)

    def write_file(location: Location, image: bytes) -> None:
        descriptor = os.open(root / location.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(descriptor, image)
        os.close(descriptor)

    yield Bench(store, write_file)
    store.close()
    shutil.rmtree(root, ignore_errors=True)  # an empty one in memory is gone already


def test_saved_rows_are_told_by_a_scan(bench: Bench) -> None:
    """A scan reports each row as its image describes it."""
    location = bench.save(1)
    scan = bench.store.read(bench.store.places())
    row = scan.rows[0]
    assert (row.key, row.token_ids, row.text, row.model_id) == (key_of(1), META.token_ids, b"ab", "tiny")
    assert row.location == location
    assert (row.hits, row.last_used_unix_s, row.pinned) == (0, META.created_unix_s, False)
    assert (scan.gone, scan.corrupt) == ((), ())


def test_bytes_are_counted_as_they_are_taken(bench: Bench) -> None:
    """Two rows count their whole images, one of them less after a delete; a lease counts as leased."""
    first = bench.save(1)
    bench.save(2)
    assert bench.store.stats() == Stats(2 * SIZE_BYTES, 0, 2)
    assert bench.store.delete(first) == SIZE_BYTES
    bench.lease(3)
    assert bench.store.stats() == Stats(SIZE_BYTES, SIZE_BYTES, 1)


def test_quota_holds_for_rows_and_leases_together(bench: Bench) -> None:
    """What does not fit the quota gets no place, and what is deleted in the same call makes room."""
    fitting = QUOTA_BYTES // SIZE_BYTES
    wants = [Want(key_of(n), SIZE_BYTES) for n in range(fitting + 1)]
    places = bench.store.room(OWNER, [], wants, give_back=False).locations
    assert [place is not None for place in places] == [True] * fitting + [False]
    assert places[0] is not None
    bench.write_image(0, places[0])
    bench.store.committed(places[0])
    again = bench.store.room(OWNER, [places[0]], wants[-1:], give_back=True)
    assert again.freed_bytes == SIZE_BYTES
    assert again.locations[0] is not None


def test_quota_can_change(bench: Bench) -> None:
    """Above a smaller quota no place is promised and nothing is lost; deletes make room below it; a larger one is used."""
    locations = [bench.save(number) for number in range(4)]
    bench.store.set_quota(2 * SIZE_BYTES)
    assert bench.lease(9) is None
    assert len(bench.keys()) == 4
    bench.store.room(OWNER, locations[:3], [], give_back=True)
    assert bench.lease(9) is not None
    assert bench.lease(10) is None
    bench.store.set_quota(4 * SIZE_BYTES)
    assert [bench.lease(number) is not None for number in (10, 11, 12)] == [True, True, False]
    assert (bench.store.quota_bytes, bench.store.note) == (4 * SIZE_BYTES, "")


def test_oversized_image_gets_no_place(bench: Bench) -> None:
    """One image larger than the quota is refused, smaller ones after it are not."""
    wants = [Want(key_of(1), QUOTA_BYTES + 64), Want(key_of(2), SIZE_BYTES)]
    places = bench.store.room(OWNER, [], wants, give_back=False).locations
    assert [place is not None for place in places] == [False, True]


def test_lease_is_no_row(bench: Bench) -> None:
    """What is being written is not in a scan, and what was given up leaves nothing."""
    location = bench.lease(1)
    assert location is not None
    assert bench.keys() == []
    assert bench.store.free([location], frozenset()) == Scan()
    assert bench.store.stats() == Stats(0, 0, 0)


def test_deleting_unknown_things_is_fine(bench: Bench) -> None:
    """Deleting twice, or a place of another life, frees nothing and harms nothing."""
    location = bench.save(1)
    bench.save(2)
    assert bench.store.delete(location) == SIZE_BYTES
    assert bench.store.delete(location) == 0
    assert bench.store.delete(Location("tier:x", 4, SIZE_BYTES, 12345, "zz/nonsense")) == 0
    assert bench.keys() == [key_of(2)]


def test_deleted_row_cannot_be_read_again(bench: Bench) -> None:
    """After a delete its place holds no image any more, for scans and for whoever still knows the place."""
    location = bench.save(1)
    bench.store.room(OWNER, [location], [], give_back=False)
    assert bench.keys() == []
    assert bench.store.committed(location).rows == ()


def test_touched_state_is_told_by_the_next_scan(bench: Bench) -> None:
    """Recency, hits, pin and marks of a row are what was last told."""
    location = bench.save(1)
    marks: list[tuple[bytes, int, str, bool]] = [
        (key_of(9), 2, "finish", True),
        (key_of(8), 1, "no_such_reason", False),
    ]
    bench.store.touch(Touch(location=location, last_used_unix_s=2e9, hits=7, marks=marks, pinned=True))
    bench.store.flush()
    row = bench.store.read(bench.store.places()).rows[0]
    assert (row.last_used_unix_s, row.hits, row.marks, row.pinned) == (2e9, 7, marks[:1], True)


def test_corrupt_row_is_reported_and_gone(bench: Bench) -> None:
    """A row with a damaged header is reported once, and is no row any more."""
    location = bench.save(1)
    bench.save(2)
    bench.write(location, b"junk" * (SIZE_BYTES // 4))
    scan = bench.store.read(bench.store.places())
    assert (scan.corrupt, [row.key for row in scan.rows]) == ((key_of(1),), [key_of(2)])
    assert bench.store.stats() == Stats(SIZE_BYTES, 0, 1)


def test_new_index_inherits_leases(bench: Bench) -> None:
    """A lease made for a dead index survives it; when it is published the new index is told what was written."""
    location = bench.lease(1)
    assert location is not None
    bench.store.hand_over(0.0)
    assert [lease.location for lease in bench.store.leases] == [location]
    bench.write_image(1, location)
    assert [row.key for row in bench.store.committed(location).rows] == [key_of(1)]
    assert bench.keys() == [key_of(1)]


def test_new_index_does_not_inherit_from_the_dead(bench: Bench) -> None:
    """Leases of an owner that died while there was no index end when the next one comes."""
    bench.lease(1)
    kept = bench.lease(2, Owner("model:other", 4))
    assert bench.store.owner_died(OWNER) == Scan()
    assert len(list(bench.store.leases)) == 2
    bench.store.hand_over(0.0)
    assert [lease.location for lease in bench.store.leases] == [kept]


def test_sweep_of_a_tidy_store_finds_nothing(bench: Bench) -> None:
    """A sweep reports neither rows that are known nor places that are being written."""
    bench.save(1)
    location = bench.lease(2)
    assert location is not None
    bench.write_image(2, location)
    assert bench.store.sweep(2e9, frozenset()) == Scan()
    assert bench.store.stats().rows == 1


def test_inherited_lease_ends_with_its_owner(bench: Bench) -> None:
    """A new index knows nothing of an old lease: when its owner dies the store ends it by itself."""
    bench.lease(1)
    bench.store.hand_over(0.0)
    bench.store.owner_died(Owner(OWNER.id, OWNER.incarnation + 1))
    assert len(list(bench.store.leases)) == 1
    bench.store.owner_died(OWNER)
    assert bench.store.stats() == Stats(0, 0, 0)


def test_inherited_lease_expires(bench: Bench) -> None:
    """An old lease that nobody publishes is not kept for ever; one that the index knows is."""
    bench.lease(1)
    bench.store.hand_over(100.0)
    bench.lease(2)
    bench.store.expire(100.0 + INHERITED_TTL_S)
    assert [lease.key for lease in bench.store.leases] == [key_of(1), key_of(2)]
    bench.store.expire(101.0 + INHERITED_TTL_S)
    assert [lease.key for lease in bench.store.leases] == [key_of(2)]


def test_deleting_a_lease_ends_it(bench: Bench) -> None:
    """An index that refuses what was published deletes the place: it is free again."""
    location = bench.lease(1)
    assert location is not None
    bench.write_image(1, location)
    assert bench.store.delete(location) == SIZE_BYTES
    assert bench.store.stats() == Stats(0, 0, 0)
    assert bench.store.sweep(2e9, frozenset()) == Scan()


def test_memory_of_a_living_writer_is_not_given_away() -> None:
    """A place that a dead index had promised to a living process is not freed under its hands."""
    store = MemoryStore("tier:ram", 5, QUOTA_BYTES, plenty)
    location = store.room(OWNER, [], [Want(key_of(1), QUOTA_BYTES)], give_back=False).locations[0]
    assert location is not None
    store.hand_over(0.0)
    store.free([location], frozenset({OWNER}))
    assert store.room(OWNER, [], [Want(key_of(2), 64)], give_back=False).locations == [None]
    store.free([location], frozenset())
    assert store.room(OWNER, [], [Want(key_of(2), 64)], give_back=False).locations != [None]
    store.close()
