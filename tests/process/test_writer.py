"""A real writer process: what it publishes is whole, at whatever stage it dies, and what it cannot publish it says."""

import asyncio
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from barrel_inference import protocol
from barrel_inference.errors import InvalidArgument, NotFound
from barrel_inference.protocol import Location, Write, Written
from barrel_inference.tiers import kvc, names
from barrel_inference.tiers.arena import Arena
from tests.process.tier_harness import Child, World, small_file_system
from tests.unit.test_kvc import META, sealed

MODULE = "barrel_inference.workers.writer"
KEY = bytes([7]) * 32
OTHER = bytes([8]) * 32
OWNER, OWNER_INCARNATION = "model:tiny", 9


class Staging:
    """A model's staging arena, served from a thread of its own."""

    def __init__(self, runtime_dir: Path) -> None:
        self.arena = Arena(64 << 20)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._path = runtime_dir / f"{OWNER}.arena"
        self._run(lambda: self.arena.serve(self._path, OWNER_INCARNATION))

    def put(self, image: bytes | bytearray) -> int:
        """An image in the arena; its offset."""
        offset = self.arena.allocate(len(image))
        assert offset is not None
        self.arena.view(offset, len(image))[:] = image
        return offset

    def close(self) -> None:
        """The model is gone; no harm if it was already."""
        if self._loop.is_closed():
            return
        self._run(self.arena.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, function: Callable[[], None]) -> None:
        async def call() -> None:
            function()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result()


@pytest.fixture
def world() -> Iterator[World]:
    """A supervisor's place and an index's."""
    world = World()
    yield world
    world.close()


@pytest.fixture
def staging(world: World) -> Iterator[Staging]:
    """A model with images to save."""
    staging = Staging(world.runtime_dir)
    yield staging
    staging.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root of a file tier."""
    path = tmp_path / "kvc"
    path.mkdir()
    return path


def writer(world: World, **environment: str) -> Child:
    """A writer, with an index."""
    child = world.child(MODULE, "writer:0", {}, environment)
    world.index_up(child, 1)
    return child


def order(staging: Staging, root: Path, key: bytes = KEY, payload: bytes = b"payload", token: int = 5) -> Write:
    """An image in staging, and the order to publish it."""
    image = sealed(replace(META, key=key), payload)
    location = Location("tier:disk", 1, len(image), 0, names.file_name(key))
    return Write(
        token=token, owner=OWNER, owner_incarnation=OWNER_INCARNATION, offset=staging.put(image),
        size_bytes=len(image), key=key, location=location, root=str(root),
    )  # fmt: skip


def files_below(root: Path) -> list[str]:
    """Every file, by its path below the root."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def is_whole(path: Path, key: bytes = KEY) -> bool:
    """Is it a complete image of that key?"""
    return kvc.open_image(memoryview(path.read_bytes()), key).meta.key == key


def test_image_becomes_one_file(world: World, staging: Staging, root: Path) -> None:
    """After a write there is exactly one complete file, and the index has heard who has it and the two questions in order."""
    child = writer(world)
    message = order(staging, root)
    assert child.call(message, Written) == Written(published=True)
    assert files_below(root) == [message.location.name]
    assert is_whole(root / message.location.name)
    assert world.heard == [
        protocol.Handed(token=5, writer="writer:0"),
        protocol.CheckReservation(token=5),
        protocol.Publish(token=5, location=message.location),
    ]


def test_bytes_written_to_a_disk_are_counted(world: World, staging: Staging, root: Path) -> None:
    """What goes to a tier of kind disk moves its counter by the size of the file."""
    child = writer(world)
    (world.runtime_dir / "tier:disk").touch()
    world.tell(child, protocol.Up(id="tier:disk", incarnation=1, pid=1, group="helper", about={"kind": "disk"}))
    message = order(staging, root)
    child.call(message, Written)
    world.until(lambda: bool(world.heard_of(protocol.Counted)))
    assert world.heard_of(protocol.Counted)[0].deltas == {"bytes_written_disk": message.size_bytes}


@pytest.mark.parametrize(
    ("stage", "complete"),
    [
        ("created", False), ("written", False), ("synced", False), ("checked", False),
        ("linked", True), ("unlinked", True), ("durable", True), ("published", True),
    ],
)  # fmt: skip
def test_death_at_any_stage_leaves_all_or_nothing(
    world: World, staging: Staging, root: Path, stage: str, complete: bool
) -> None:
    """Wherever a writer is killed, the final name is a whole image or does not exist, and the next one can do the work."""
    child = writer(world, BARREL_TEST_STOP_AT=stage)
    message = order(staging, root)
    child.ask(message)
    assert child.wait() == -signal.SIGKILL
    final = root / message.location.name
    assert final.exists() == complete
    if complete:
        assert is_whole(final)
    successor = writer(world)
    assert successor.call(message, Written).published
    assert is_whole(final)


def test_lost_reservation_is_not_published(world: World, staging: Staging, root: Path) -> None:
    """A writer whose reservation is gone leaves nothing and says so."""
    child = writer(world)
    world.refuse[protocol.CheckReservation] = NotFound("no such reservation")
    assert child.call(order(staging, root), Written) == Written(published=False)
    assert files_below(root) == []
    world.until(lambda: bool(world.heard_of(protocol.Abort)))
    assert world.heard_of(protocol.Abort) == [protocol.Abort(tokens=[5], reason="failed")]


def test_equal_file_is_adopted(world: World, staging: Staging, root: Path) -> None:
    """A valid file that is there already is kept, and the index learns its size."""
    child = writer(world)
    message = order(staging, root)
    final = root / message.location.name
    final.parent.mkdir()
    there = bytes(sealed(replace(META, key=KEY, model_id="another"), b"another payload" * 100))
    final.write_bytes(there)
    assert child.call(message, Written) == Written(published=True, adopted=True)
    assert final.read_bytes() == there
    published = world.heard_of(protocol.Publish)[0]
    assert (published.adopted, published.location.size_bytes) == (True, len(there))
    assert files_below(root) == [message.location.name]


def test_file_with_other_tokens_keeps_its_own(world: World, staging: Staging, root: Path) -> None:
    """When the file that is there has the same bytes in other tokens, ours are not claimed for it: the place is given back."""
    child = writer(world)
    message = order(staging, root)
    final = root / message.location.name
    final.parent.mkdir()
    there = bytes(sealed(replace(META, key=KEY, token_ids=META.token_ids[::-1]), b"payload"))
    final.write_bytes(there)
    assert child.call(message, Written) == Written(published=False, adopted=True)
    assert final.read_bytes() == there
    world.until(lambda: bool(world.heard_of(protocol.Abort)))
    assert world.heard_of(protocol.Publish) == []


@pytest.mark.parametrize("content", [b"", b"junk" * 1000])
def test_invalid_file_is_replaced(world: World, staging: Staging, root: Path, content: bytes) -> None:
    """A file that has the name and is no image does not keep a row from being saved."""
    child = writer(world)
    message = order(staging, root)
    final = root / message.location.name
    final.parent.mkdir()
    final.write_bytes(content)
    assert child.call(message, Written) == Written(published=True)
    assert is_whole(final)


def test_link_in_the_files_place_is_replaced(world: World, staging: Staging, root: Path, tmp_path: Path) -> None:
    """A link that has the name is not written through."""
    child = writer(world)
    message = order(staging, root)
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    final = root / message.location.name
    final.parent.mkdir()
    final.symlink_to(outside)
    assert child.call(message, Written) == Written(published=True)
    assert outside.read_bytes() == b"precious"
    assert not final.is_symlink()
    assert is_whole(final)


def test_link_in_the_directorys_place_is_refused(world: World, staging: Staging, root: Path, tmp_path: Path) -> None:
    """Nothing is written below a linked directory."""
    child = writer(world)
    (tmp_path / "elsewhere").mkdir()
    (root / names.shard_of(KEY)).symlink_to(tmp_path / "elsewhere")
    assert child.call(order(staging, root), Written) == Written(published=False)
    assert files_below(tmp_path / "elsewhere") == []


def test_name_of_another_key_is_refused(world: World, staging: Staging, root: Path) -> None:
    """A location that leads elsewhere is an error before anything is touched."""
    child = writer(world)
    message = order(staging, root)
    bad = Location("tier:disk", 1, message.size_bytes, 0, "../elsewhere")
    with pytest.raises(InvalidArgument):
        child.call(with_location(message, bad), Written)


def with_location(message: Write, location: Location) -> Write:
    """The same order for another place."""
    return Write(
        token=message.token, owner=message.owner, owner_incarnation=message.owner_incarnation, offset=message.offset,
        size_bytes=message.size_bytes, key=message.key, location=location, root=message.root,
    )  # fmt: skip


def test_missing_root_is_a_failed_write(world: World, staging: Staging, root: Path) -> None:
    """A root that is gone is answered, and the writer goes on."""
    child = writer(world)
    shutil.rmtree(root)
    assert child.call(order(staging, root), Written) == Written(published=False)
    root.mkdir()
    assert child.call(order(staging, root, token=6), Written) == Written(published=True)


def test_damaged_staging_is_not_published(world: World, staging: Staging, root: Path) -> None:
    """An image that is not what its header says never gets a name."""
    child = writer(world)
    message = order(staging, root)
    staging.arena.view(message.offset + message.size_bytes - kvc.TRAILER_BYTES - 64, 1)[:] = b"X"
    assert child.call(message, Written) == Written(published=False)
    assert files_below(root) == []


def test_writer_finishes_for_a_model_that_died(world: World, staging: Staging, root: Path) -> None:
    """What a writer was handed is finished from its own mapping, begun or not; a later one of the dead model is refused."""
    child = writer(world, BARREL_TEST_WRITE_DELAY_S="0.3")
    messages = [order(staging, root), order(staging, root, key=OTHER, token=6)]
    for message in messages:
        child.ask(message)
    world.until(lambda: any(".tmp" in name for name in files_below(root)) and len(world.heard_of(protocol.Handed)) == 2)
    late = order(staging, root, key=bytes(32), token=7)
    staging.close()
    world.tell(child, protocol.Down(id=OWNER, incarnation=OWNER_INCARNATION, reason="killed", restarting=True))
    child.ask(late)
    world.until(lambda: bool(world.heard_of(protocol.Abort)))
    assert world.heard_of(protocol.Abort) == [protocol.Abort(tokens=[7], reason="failed")]
    assert [publish.token for publish in world.heard_of(protocol.Publish)] == [5, 6]
    assert is_whole(root / messages[0].location.name)
    assert is_whole(root / messages[1].location.name, OTHER)


def test_slow_disk_does_not_stop_the_process(world: World, staging: Staging, root: Path) -> None:
    """While a write takes its time the process answers others and beats."""
    child = writer(world, BARREL_TEST_WRITE_DELAY_S="1")
    child.ask(order(staging, root))
    world.until(lambda: any(".tmp" in name for name in files_below(root)))
    message = order(staging, root)
    bad = Location("tier:disk", 1, message.size_bytes, 0, "bad")
    with pytest.raises(InvalidArgument):
        child.call(with_location(message, bad), Written)
    assert world.heard_of(protocol.Publish) == []
    world.until(lambda: bool(world.heard_of(protocol.Publish)))


def test_writes_are_published_in_the_order_they_came(world: World, staging: Staging, root: Path) -> None:
    """Parents come before their children, because nothing overtakes."""
    child = writer(world)
    for token in range(1, 6):
        child.ask(order(staging, root, key=bytes([token]) * 32, token=token))
    world.until(lambda: len(world.heard_of(protocol.Publish)) == 5)
    assert [publish.token for publish in world.heard_of(protocol.Publish)] == [1, 2, 3, 4, 5]


def test_stop_finishes_the_write_under_way(world: World, staging: Staging, root: Path) -> None:
    """SIGTERM lets the write that is under way end, and then the process."""
    child = writer(world, BARREL_TEST_WRITE_DELAY_S="0.3")
    message = order(staging, root)
    child.ask(message)
    world.until(lambda: any(".tmp" in name for name in files_below(root)))
    assert child.terminate() == 0
    assert is_whole(root / message.location.name)
    assert files_below(root) == [message.location.name]


@pytest.fixture
def small_root(tmp_path: Path) -> Iterator[Path]:
    """A root on a file system of 1 MiB."""
    with small_file_system(tmp_path) as path:
        yield path


def test_full_disk_is_a_failed_write(world: World, staging: Staging, small_root: Path) -> None:
    """What does not fit is refused before a byte is written, leaves nothing, and the next smaller one goes through."""
    child = writer(world)
    assert child.call(order(staging, small_root, payload=bytes(2 << 20)), Written) == Written(published=False)
    assert files_below(small_root) == []
    assert child.call(order(staging, small_root, key=OTHER, token=6), Written) == Written(published=True)


def test_read_only_disk_is_a_failed_write(world: World, staging: Staging, small_root: Path) -> None:
    """A file system that takes nothing is answered, and the writer goes on."""
    child = writer(world)
    subprocess.run(["mount", "-o", "remount,ro", str(small_root)], check=True)
    assert child.call(order(staging, small_root), Written) == Written(published=False)
    subprocess.run(["mount", "-o", "remount,rw", str(small_root)], check=True)
    assert child.call(order(staging, small_root, token=6), Written) == Written(published=True)
