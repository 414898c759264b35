"""What can happen to a directory under a running file tier, and what the tier makes of it."""

import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from barrel_inference.errors import TierUnavailable
from barrel_inference.protocol import Location, Tier, Touch
from barrel_inference.tiers import kvc, names
from barrel_inference.tiers.image_root import TEMP_TTL_S, ImageRoot
from barrel_inference.tiers.leases import Owner
from barrel_inference.tiers.store import Want
from barrel_inference.tiers.store_files import FileStore
from tests.unit.test_kvc import KEY, META, sealed

OTHER = bytes([7]) * 32
OWNER = Owner("model:tiny", 1)
NOW_S = 2e9


def opened(root: Path, quota_bytes: int = 1 << 20, kind: Tier = Tier.DISK, free_bytes: int | None = None) -> FileStore:
    """A store on a directory."""
    free_memory = None if free_bytes is None else lambda: free_bytes
    return FileStore(kind, "tier:disk", 1, quota_bytes, root, free_memory)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root that does not exist yet."""
    return tmp_path / "state" / "kvc"


@pytest.fixture
def store(root: Path) -> Iterator[FileStore]:
    """A store with one row."""
    store = opened(root)
    put(root, KEY)
    store.sweep(NOW_S, frozenset())
    yield store
    store.close()


def put(root: Path, key: bytes, payload: bytes = b"payload") -> Path:
    """A complete image file that came from somewhere else."""
    path = root / names.file_name(key)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(sealed(replace(META, key=key), payload))
    return path


def keys(store: FileStore) -> list[bytes]:
    """Keys of all rows."""
    return sorted(row.key for row in store.read(store.places()).rows)


def test_missing_root_is_made_private(root: Path) -> None:
    """The root and the directories above it are made, closed to others."""
    opened(root).close()
    assert root.stat().st_mode & 0o777 == 0o700


def test_root_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """A root below a file is refused with its path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(TierUnavailable, match="file/kvc"):
        opened(tmp_path / "file/kvc")


def test_rows_survive_a_restart(root: Path) -> None:
    """A store that is opened again has the rows and the bytes of the one before, hits included."""
    store = opened(root)
    put(root, KEY)
    row = store.sweep(NOW_S, frozenset()).rows[0]
    size_bytes = store.stats().stored_bytes
    path = root / row.location.name
    image = bytearray(path.read_bytes())
    image[-kvc.TRAILER_BYTES :] = kvc.pack_trailer(kvc.Trailer(5.0, 7, False))
    path.write_bytes(image)
    store.close()
    again = opened(root)
    assert again.stats().stored_bytes == size_bytes
    assert [(row.key, row.hits) for row in again.read(again.places()).rows] == [(KEY, 7)]
    again.close()


def test_second_runtime_is_kept_out(root: Path, store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiers on one root would delete each other's rows: the second gives up and says why."""
    monkeypatch.setattr("barrel_inference.tiers.image_root.LOCK_WAIT_S", 0.0)
    with pytest.raises(TierUnavailable, match="in use by another runtime"):
        opened(root)


def test_successor_waits_for_the_lock(root: Path) -> None:
    """A tier that is started while its predecessor drains gets the root when that one is gone."""
    first = opened(root)
    got: list[FileStore] = []
    thread = threading.Thread(target=lambda: got.append(opened(root)))
    thread.start()
    first.close()
    thread.join()
    got[0].close()


def test_file_from_elsewhere_is_adopted(root: Path, store: FileStore) -> None:
    """A complete file that the store does not know becomes a row, and is reported."""
    put(root, OTHER)
    assert [row.key for row in store.sweep(NOW_S, frozenset()).rows] == [OTHER]
    assert keys(store) == sorted([KEY, OTHER])
    assert store.sweep(NOW_S, frozenset()).rows == ()


@pytest.mark.parametrize("content", [b"", b"junk", kvc.MAGIC + bytes(2000)])
def test_junk_is_removed(root: Path, store: FileStore, content: bytes) -> None:
    """A file with an image's name that is none is removed and reported as corrupt."""
    path = root / names.file_name(OTHER)
    path.parent.mkdir()
    path.write_bytes(content)
    assert store.sweep(NOW_S, frozenset()).corrupt == (OTHER,)
    assert not path.exists()


def test_stranger_with_a_damaged_payload_is_removed(root: Path, store: FileStore) -> None:
    """Before a file from elsewhere is adopted all of it is read."""
    path = put(root, OTHER)
    path.write_bytes(path.read_bytes().replace(b"payload", b"pAyload"))
    assert store.sweep(NOW_S, frozenset()).corrupt == (OTHER,)
    assert not path.exists()


def test_link_in_a_files_place_is_not_followed(root: Path, store: FileStore, tmp_path: Path) -> None:
    """A link that has a key's name is removed, what it points to stays."""
    target = tmp_path / "outside.kvc"
    target.write_bytes(sealed(replace(META, key=OTHER), b"payload"))
    link = root / names.file_name(OTHER)
    link.parent.mkdir()
    link.symlink_to(target)
    assert store.sweep(NOW_S, frozenset()).corrupt == (OTHER,)
    assert not link.is_symlink()
    assert target.exists()


def test_link_in_a_directorys_place_is_not_followed(root: Path, store: FileStore, tmp_path: Path) -> None:
    """No place is given below a linked directory."""
    (tmp_path / "elsewhere").mkdir()
    (root / names.shard_of(OTHER)).symlink_to(tmp_path / "elsewhere")
    assert store.room(OWNER, [], [Want(OTHER, 2048)], give_back=False).locations == [None]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make what belongs to another user")
def test_root_that_is_anothers_link_is_refused(tmp_path: Path) -> None:
    """In /dev/shm anybody can make a link that leads to a directory of ours."""
    (tmp_path / "ours").mkdir()
    link = tmp_path / "root"
    link.symlink_to(tmp_path / "ours")
    os.lchown(link, 12345, 12345)
    with pytest.raises(TierUnavailable, match="belongs to another user"):
        ImageRoot(link)
    assert list((tmp_path / "ours").iterdir()) == []


def test_fifo_in_a_files_place_does_not_block(root: Path, store: FileStore) -> None:
    """Something that is not a file is removed and reported as corrupt."""
    path = root / names.file_name(OTHER)
    path.parent.mkdir()
    os.mkfifo(path)
    assert store.sweep(NOW_S, frozenset()).corrupt == (OTHER,)
    assert not path.exists()


def test_removed_file_is_reported(root: Path, store: FileStore) -> None:
    """A row whose file was removed behind our back is gone with its bytes."""
    (root / names.file_name(KEY)).unlink()
    assert store.sweep(NOW_S, frozenset()).gone == (KEY,)
    assert store.stats() == (0, 0, 0)


def test_cut_file_is_corrupt(root: Path, store: FileStore) -> None:
    """A row whose file was truncated is removed and reported."""
    path = root / names.file_name(KEY)
    os.truncate(path, 500)
    assert store.sweep(NOW_S, frozenset()).corrupt == (KEY,)
    assert not path.exists()


def test_removed_directory_takes_its_rows_along(root: Path, store: FileStore) -> None:
    """A scan of rows whose directory is gone reports them all."""
    shutil.rmtree(root / names.shard_of(KEY))
    assert store.read(store.places()).gone == (KEY,)


def test_removed_root_is_made_again(root: Path, store: FileStore) -> None:
    """After the whole root was removed there are places again, in a new one."""
    shutil.rmtree(root)
    location = store.room(OWNER, [], [Want(OTHER, 2048)], give_back=False).locations[0]
    assert location is not None
    assert (root / names.shard_of(OTHER)).is_dir()
    assert store.sweep(NOW_S, frozenset()).gone == (KEY,)


def test_places_are_where_the_name_leads(root: Path, store: FileStore) -> None:
    """When the root is moved away and another takes its name, as an unmount does, the next place is in that one at once."""
    root.rename(root.with_name("moved"))
    root.mkdir()
    [location] = store.room(OWNER, [], [Want(OTHER, 100)], give_back=False).locations
    assert location is not None
    assert (root / location.name).parent.is_dir()
    assert store.sweep(NOW_S, frozenset()).gone == (KEY,)


def test_leftovers_of_dead_writers_go(root: Path, store: FileStore) -> None:
    """A temporary file goes when its writer died, or is old; that of a living writer stays."""
    directory = root / names.shard_of(KEY)
    mine, dead, nobodys = (directory / names.temp_name(KEY, pid, 1) for pid in (os.getpid(), os.getppid(), 2**22 + 1))
    for path in (mine, dead, nobodys):
        path.write_bytes(b"half")
    store.sweep(mine.stat().st_mtime, frozenset({os.getppid()}))
    assert [path.exists() for path in (mine, dead, nobodys)] == [True, False, False]
    store.sweep(mine.stat().st_mtime + TEMP_TTL_S + 1, frozenset())
    assert not mine.exists()


@pytest.mark.parametrize("jump_s", [-1e9, 1e9])
def test_a_clock_that_jumps_makes_no_leftovers(root: Path, store: FileStore, jump_s: float) -> None:
    """What a writer of ours is writing stays, whatever the wall clock says of its age."""
    path = root / names.shard_of(KEY) / names.temp_name(KEY, os.getpid(), 1)
    path.write_bytes(b"half")
    store.sweep(path.stat().st_mtime + jump_s, frozenset(), frozenset({os.getpid()}))
    assert path.exists()


def test_file_of_a_given_up_lease_is_adopted(root: Path, store: FileStore) -> None:
    """A writer that died after it had linked: when the place is given up, the row is kept."""
    location = store.room(OWNER, [], [Want(OTHER, 2048)], give_back=False).locations[0]
    assert location is not None
    put(root, OTHER)
    assert store.sweep(NOW_S, frozenset()).rows == ()
    assert [row.key for row in store.free([location], frozenset()).rows] == [OTHER]


def test_what_cannot_be_removed_counts_until_it_can(root: Path) -> None:
    """A file that stays although it should go keeps its bytes of the quota; it goes when that becomes possible, by the next
    sweep or when room is needed, and not if the key is stored anew."""
    root.mkdir(parents=True)
    size_bytes = put(root, KEY).stat().st_size
    store = opened(root, quota_bytes=size_bytes * 3 // 2)
    path = root / names.file_name(KEY)
    want = [Want(OTHER, size_bytes)]
    for frees_by_sweep in (True, False):
        image = path.read_bytes()
        path.unlink()
        path.mkdir()
        (path / "in the way").touch()
        assert store.delete(Location("tier:disk", 1, size_bytes, 0, names.file_name(KEY))) == 0
        assert store.room(OWNER, [], want, give_back=False).locations == [None]
        (path / "in the way").unlink()
        if frees_by_sweep:
            store.sweep(NOW_S, frozenset())
            assert not path.exists()
        [location] = store.room(OWNER, [], want, give_back=False).locations
        assert location is not None
        assert not path.exists()
        store.delete(location)
        path.write_bytes(image)
        assert len(store.sweep(NOW_S, frozenset()).rows) == 1
        store.sweep(NOW_S, frozenset())
        assert keys(store) == [KEY]
    store.close()


def test_published_file_that_is_not_there_is_reported(store: FileStore) -> None:
    """A publication is checked: no row without a file."""
    location = store.room(OWNER, [], [Want(OTHER, 2048)], give_back=False).locations[0]
    assert location is not None
    store.committed(location)
    assert keys(store) == [KEY]


def test_adopted_file_counts_with_its_own_size(root: Path, store: FileStore) -> None:
    """When a writer found a file there, the bytes that count are those of the file."""
    store.delete(Location("tier:disk", 1, 0, 0, names.file_name(KEY)))
    location = store.room(OWNER, [], [Want(OTHER, 2048)], give_back=False).locations[0]
    assert location is not None
    path = put(root, OTHER, b"x" * 5000)
    store.committed(location)
    assert store.stats().stored_bytes == path.stat().st_size


def test_quota_is_lowered_to_the_file_system(root: Path) -> None:
    """A quota beyond the file system's free space is lowered, and the note has both numbers."""
    store = opened(root, quota_bytes=1 << 60)
    assert store.quota_bytes < 1 << 60
    assert f"lowered from {1 << 60} to {store.quota_bytes}" in store.note
    store.close()


def test_quota_of_memory_files_is_lowered_to_the_memory(root: Path) -> None:
    """Files on tmpfs are memory: half of what is free, and no place when it got short."""
    store = opened(root, kind=Tier.RAM_FILE, free_bytes=1000)
    assert store.quota_bytes == 500
    assert "memory allows no more" in store.note
    assert store.room(OWNER, [], [Want(OTHER, 100)], give_back=False).locations == [None]
    store.close()


def test_trailer_of_a_changed_file_is_not_written(root: Path, store: FileStore) -> None:
    """A file that is not as long as it was is left as it is."""
    row = store.read(store.places()).rows[0]
    (root / row.location.name).write_bytes(b"x" * 5000)
    store.touch(Touch(location=row.location, last_used_unix_s=1.0, hits=1, marks=[], pinned=False))
    store.flush()
    assert (root / row.location.name).read_bytes() == b"x" * 5000


def test_empty_root_in_memory_goes_at_the_end(root: Path) -> None:
    """A memory tier that holds nothing leaves nothing behind; one with a row, and one on disk, stay."""
    store = opened(root, kind=Tier.RAM_FILE, free_bytes=1 << 30)
    store.room(OWNER, [], [Want(OTHER, 2048)], give_back=False)
    store.close()
    assert not root.exists()
    opened(root).close()
    assert root.exists()
    put(root, KEY)
    opened(root, kind=Tier.RAM_FILE, free_bytes=1 << 30).close()
    assert (root / names.file_name(KEY)).exists()


def test_successor_of_one_that_removed_its_root(root: Path) -> None:
    """A tier that waited for a lock which was removed with its directory makes both anew."""
    first = opened(root, kind=Tier.RAM_FILE, free_bytes=1 << 30)
    got: list[FileStore] = []
    thread = threading.Thread(target=lambda: got.append(opened(root)))
    thread.start()
    first.close()
    thread.join()
    assert (root / ".lock").exists()
    got[0].close()
