"""A real tier process: it answers the index, tells a new one everything, and survives what happens to its bytes."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from barrel_inference import protocol
from barrel_inference.errors import InvalidArgument, NotFound
from barrel_inference.protocol import Location, Room, Roomed
from barrel_inference.tiers import names
from barrel_inference.tiers.arena import Mapping
from tests.process.tier_harness import Child, World, small_file_system
from tests.unit.test_kvc import META, sealed

MODULE = "barrel_inference.tiers.tier"
KEYS = [bytes([number]) * 32 for number in range(8)]
PAYLOAD = b"payload"
SIZE_BYTES = len(sealed(META, PAYLOAD))
QUOTA_BYTES = 1 << 20


@pytest.fixture
def world() -> Iterator[World]:
    """A supervisor's place and an index's."""
    world = World()
    yield world
    world.close()


@pytest.fixture(params=["ram", "ram_file", "disk"])
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of tier."""
    return str(request.param)


@pytest.fixture
def root() -> Iterator[str]:
    """A root that does not exist yet."""
    above = tempfile.mkdtemp(dir="/dev/shm")
    yield f"{above}/kvc"
    shutil.rmtree(above)


def boot(kind: str, root: str, **more: Any) -> dict[str, Any]:
    """The tier's part of the boot document."""
    return {"kind": kind, "name": kind, "root": "" if kind == "ram" else root, **more}


def quota(kind: str, quota_bytes: int = QUOTA_BYTES) -> dict[str, Any]:
    """The tier's part of the settings."""
    return {"tiers": {kind: {"quota_bytes": quota_bytes}}}


def tier(world: World, kind: str, root: str, **more: Any) -> Child:
    """A tier and an index that heard its replay."""
    child = world.child(MODULE, f"tier:{kind}", boot(kind, root, **more), settings=quota(kind))
    world.index_up(child, 1)
    replayed(world)
    return child


def replayed(world: World) -> list[protocol.StoredRow]:
    """Rows of a whole replay."""
    world.until(lambda: any(replay.last for replay in world.heard_of(protocol.Replay)))
    return [row for replay in world.heard_of(protocol.Replay) for row in replay.rows]


def lease(
    child: Child, key: bytes, size_bytes: int = SIZE_BYTES, deletes: tuple[Location, ...] = ()
) -> Location | None:
    """Room for one image of a model."""
    return child.call(
        Room(owner="model:tiny", owner_incarnation=9, deletes=list(deletes), names=[key], sizes=[size_bytes]), Roomed
    ).locations[0]


def write(world: World, child: Child, key: bytes, location: Location) -> None:
    """The image, as a model or a writer would bring it there."""
    image = sealed(replace(META, key=key), PAYLOAD)
    if location.name:
        Path(child.about["root"], location.name).write_bytes(image)
        return
    attached: list[Mapping] = [Mapping.attach(Path(child.about["arena"]), child.incarnation)]
    attached[0].view(location.offset, len(image))[:] = image


def save(world: World, child: Child, key: bytes) -> Location:
    """One row."""
    location = lease(child, key)
    assert location is not None
    write(world, child, key, location)
    child.cast(protocol.Committed(location=location))
    return location


def new_index(world: World, child: Child) -> list[protocol.StoredRow]:
    """The index dies and comes back; the rows that the new one hears of."""
    world.index_down(child, 1)
    world.index_up(child, 2)
    return replayed(world)


def test_tier_says_what_it_is(world: World, kind: str, root: str) -> None:
    """Its peers learn kind, root and arena; a new index learns quota and that there is nothing yet."""
    child = tier(world, kind, root)
    assert child.about["kind"] == kind
    assert bool(child.about["arena"]) == (kind == "ram")
    assert [(m.quota_bytes, m.rows, m.note) for m in world.heard_of(protocol.Replay)] == [(QUOTA_BYTES, [], "")]


def test_rows_are_replayed_to_a_new_index(world: World, kind: str, root: str) -> None:
    """After the index died, its successor hears all rows with recency and pins, and the places that are being written."""
    child = tier(world, kind, root)
    places = [save(world, child, key) for key in KEYS[:3]]
    child.cast(protocol.Touch(location=places[0], last_used_unix_s=2e9, hits=7, marks=[], pinned=True))
    open_place = lease(child, KEYS[5])
    assert open_place is not None
    rows = new_index(world, child)
    assert sorted(row.key for row in rows) == KEYS[:3]
    assert sorted(row.location.size_bytes for row in rows) == [SIZE_BYTES] * 3
    assert [(row.hits, row.pinned) for row in sorted(rows, key=lambda row: row.key)] == [
        (7, True),
        (0, False),
        (0, False),
    ]
    leases = [one for replay in world.heard_of(protocol.Replay) for one in replay.leases]
    assert leases == [("model:tiny", 9, open_place)]


def test_publication_of_an_inherited_place_is_told_to_the_new_index(world: World, kind: str, root: str) -> None:
    """An image that was begun for a dead index is a row of the next one: nothing acknowledged is lost."""
    child = tier(world, kind, root)
    location = lease(child, KEYS[1])
    assert location is not None
    new_index(world, child)
    write(world, child, KEYS[1], location)
    child.cast(protocol.Committed(location=location))
    world.until(lambda: bool(world.heard_of(protocol.Adopt)))
    assert [adopt.row.key for adopt in world.heard_of(protocol.Adopt)] == [KEYS[1]]


def test_places_of_an_owner_that_died_without_an_index_are_freed(world: World, kind: str, root: str) -> None:
    """When model and index die together, the model's places are not left taken."""
    child = tier(world, kind, root)
    lease(child, KEYS[1], QUOTA_BYTES // 2)
    world.index_down(child, 1)
    world.tell(child, protocol.Down(id="model:tiny", incarnation=9, reason="killed", restarting=True))
    world.index_up(child, 2)
    replayed(world)
    assert [replay.leases for replay in world.heard_of(protocol.Replay)] == [[]]
    assert lease(child, KEYS[2], QUOTA_BYTES) is not None


def test_quota_is_never_exceeded(world: World, kind: str, root: str) -> None:
    """A place beyond the quota is refused until something is deleted, or given up."""
    child = tier(world, kind, root)
    location = save(world, child, KEYS[0])
    rest = lease(child, KEYS[1], QUOTA_BYTES - SIZE_BYTES)
    assert rest is not None
    assert lease(child, KEYS[2]) is None
    assert lease(child, KEYS[2], SIZE_BYTES, (location,)) is not None
    child.cast(protocol.Free(locations=[rest]))
    assert lease(child, KEYS[3], QUOTA_BYTES - SIZE_BYTES) is not None


def test_malformed_room_is_refused(world: World, kind: str, root: str) -> None:
    """Names and sizes that do not belong together are an error, and the tier goes on."""
    child = tier(world, kind, root)
    with pytest.raises(InvalidArgument):
        child.call(Room(owner="x", owner_incarnation=1, deletes=[], names=KEYS[:2], sizes=[64]), Roomed)
    assert lease(child, KEYS[0]) is not None


def test_stop_leaves_nothing_in_the_runtime_directory(world: World, kind: str, root: str) -> None:
    """After SIGTERM the tier's sockets are gone and its exit status is 0."""
    child = tier(world, kind, root)
    assert child.terminate() == 0
    assert [path.name for path in world.runtime_dir.iterdir() if path.name.startswith("tier")] == []


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_file_rows_survive_the_process(world: World, root: str, stop: signal.Signals) -> None:
    """A restarted file tier tells all rows; after an orderly stop with the hits that they had."""
    child = tier(world, "disk", root)
    location = save(world, child, KEYS[0])
    child.cast(protocol.Touch(location=location, last_used_unix_s=2e9, hits=7, marks=[], pinned=True))
    lease(child, KEYS[1])  # answered after the touch was taken
    if stop is signal.SIGTERM:
        child.terminate()
    else:
        child.kill()
    world.heard.clear()
    tier(world, "disk", root)
    rows = [row for replay in world.heard_of(protocol.Replay) for row in replay.rows]
    assert [row.key for row in rows] == [KEYS[0]]
    if stop is signal.SIGTERM:
        assert [(row.hits, row.pinned, row.last_used_unix_s) for row in rows] == [(7, True, 2e9)]


def test_killed_memory_tier_starts_empty(world: World, root: str) -> None:
    """A memory tier that was killed comes back without rows, with its whole quota."""
    child = tier(world, "ram", root)
    save(world, child, KEYS[0])
    child.kill()
    world.heard.clear()
    child = tier(world, "ram", root)
    assert replayed(world) == []
    assert lease(child, KEYS[0], QUOTA_BYTES) is not None


def test_what_happens_to_files_is_reported(world: World, root: str) -> None:
    """Removed, damaged and unknown files are noticed without a restart, and the index is told."""
    child = tier(world, "disk", root, sweep_s=0.05)
    removed, damaged = save(world, child, KEYS[0]), save(world, child, KEYS[1])
    lease(child, KEYS[7])
    Path(root, removed.name).unlink()
    Path(root, damaged.name).write_bytes(b"junk")
    stranger = Path(root, names.file_name(KEYS[2]))
    stranger.parent.mkdir()
    temporary = stranger.with_suffix(".new")
    temporary.write_bytes(sealed(replace(META, key=KEYS[2]), PAYLOAD))
    temporary.rename(stranger)
    world.until(lambda: len(world.heard_of(protocol.Lost)) >= 2 and bool(world.heard_of(protocol.Adopt)))
    lost = {(lost.keys[0], lost.corrupt) for lost in world.heard_of(protocol.Lost)}
    assert lost == {(KEYS[0], False), (KEYS[1], True)}
    assert [adopt.row.key for adopt in world.heard_of(protocol.Adopt)] == [KEYS[2]]


def test_row_that_the_index_does_not_want_goes(world: World, root: str) -> None:
    """A file that the index refuses to adopt is removed: nobody could ever find it."""
    tier(world, "disk", root, sweep_s=0.05)
    world.refuse[protocol.Adopt] = NotFound("its parent is gone")
    stranger = Path(root, names.file_name(KEYS[2]))
    stranger.parent.mkdir()
    stranger.write_bytes(sealed(replace(META, key=KEYS[2]), PAYLOAD))
    world.until(lambda: not stranger.exists())


def test_root_that_cannot_be_made_is_said_at_once(world: World) -> None:
    """A tier that can never start says so, instead of dying again and again."""
    Path(world.runtime_dir, "file").write_text("")
    child = Child(world, MODULE, "tier:disk", boot("disk", f"{world.runtime_dir}/file/kvc"), {}, quota("disk"))
    world.children.append(child)
    world.until(lambda: any(isinstance(message, protocol.CannotStart) for message in world.told))
    assert child.wait() == 78


def test_rows_of_a_large_tier_come_in_batches(world: World, root: str) -> None:
    """A replay of many rows is several messages, each far below the limit, and says when it is complete."""
    for number in range(1200):
        key = number.to_bytes(2, "big") * 16
        path = Path(root, names.file_name(key))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sealed(replace(META, key=key), PAYLOAD))
    child = world.child(MODULE, "tier:disk", boot("disk", root), settings=quota("disk", 1 << 30))
    world.index_up(child, 1)
    assert len(replayed(world)) == 1200
    assert [len(replay.rows) for replay in world.heard_of(protocol.Replay)] == [500, 500, 200, 0]


def test_leftovers_of_a_writer_go_when_it_dies(world: World, root: str) -> None:
    """A temporary file is removed as soon as its writer is known to be dead, even if its process id is in use again."""
    child = tier(world, "disk", root)
    lease(child, KEYS[1])
    leftover = Path(root, names.shard_of(KEYS[1]), names.temp_name(KEYS[1], os.getpid(), 5))
    leftover.write_bytes(b"half an image")
    (world.runtime_dir / "writer:0").touch()
    world.tell(child, protocol.Up(id="writer:0", incarnation=3, pid=os.getpid(), group="helper", about={}))
    world.tell(child, protocol.Down(id="writer:0", incarnation=3, reason="killed", restarting=True))
    world.until(lambda: not leftover.exists())


@pytest.fixture
def small_root(tmp_path: Path) -> Iterator[Path]:
    """A root on a file system of 1 MiB."""
    with small_file_system(tmp_path) as path:
        yield path


def test_full_file_system_gives_no_place(world: World, small_root: Path) -> None:
    """The quota is lowered to what is there, with a note, and what would not fit gets no place."""
    child = world.child(MODULE, "tier:disk", boot("disk", str(small_root)), settings=quota("disk", 1 << 30))
    world.index_up(child, 1)
    replayed(world)
    replay = world.heard_of(protocol.Replay)[0]
    assert replay.quota_bytes <= 1 << 20
    assert replay.note.startswith(f"quota lowered from {1 << 30} to {replay.quota_bytes}")
    (small_root / "of_another").write_bytes(bytes(1 << 19))
    assert lease(child, KEYS[0], 800_000) is None
    assert lease(child, KEYS[0], 300_000) is not None


def test_read_only_file_system_is_read(world: World, small_root: Path) -> None:
    """Rows of a file system that takes nothing are told and stay; places are not given, and the note says why."""
    child = tier(world, "disk", str(small_root))
    location = save(world, child, KEYS[0])
    lease(child, KEYS[1])
    child.terminate()
    world.heard.clear()
    subprocess.run(["mount", "-o", "remount,ro", str(small_root)], check=True)
    child = tier(world, "disk", str(small_root))
    assert [row.location for row in replayed(world)] == [with_incarnation(location, child)]
    assert "read-only" in world.heard_of(protocol.Replay)[0].note
    assert lease(child, KEYS[2]) is None
    child.cast(protocol.Touch(location=location, last_used_unix_s=2e9, hits=7, marks=[], pinned=True))
    assert child.terminate() == 0


def with_incarnation(location: Location, child: Child) -> Location:
    """The same place, as a later life of the tier names it."""
    return Location(location.server, child.incarnation, location.size_bytes, location.offset, location.name)
