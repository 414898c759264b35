"""Each mode tells changed files apart as it promises, and remembers what it has read."""

import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from barrel_inference.errors import BadModel
from barrel_inference.workers.model.fingerprint import fingerprint_of
from tests.model.tiny_gguf import write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model file that a test may change."""
    path = tmp_path / "model.gguf"
    write_model("dense", path)
    return path


def flip(path: Path, position: int) -> None:
    """Change one byte; negative positions count from the end."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_safe_is_the_sha256_of_the_file(model: Path, tmp_path: Path) -> None:
    """So it can be compared with what a download page says."""
    import hashlib

    assert fingerprint_of([model], "safe", None, tmp_path) == hashlib.sha256(model.read_bytes()).digest()


@pytest.mark.parametrize(
    ("mode", "position", "is_seen"),
    [
        ("safe", 8, True),
        ("safe", -1, True),
        ("gguf_chunked", 300, True),  # metadata
        ("gguf_chunked", 120_000, False),  # beyond the first tensor
        ("fast_unsafe", -1, True),  # by its times
    ],
)
def test_what_each_mode_notices(model: Path, tmp_path: Path, mode: str, position: int, is_seen: bool) -> None:
    """A changed byte changes the fingerprint, where the mode looks."""
    before = fingerprint_of([model], mode, None, tmp_path)
    flip(model, position)
    assert (fingerprint_of([model], mode, None, tmp_path) != before) is is_seen


def test_the_chunk_holds_the_first_tensor(model: Path, tmp_path: Path) -> None:
    """A byte of it counts."""
    reader = gguf.GGUFReader(model)
    start = min(int(tensor.data_offset) for tensor in reader.tensors)
    before = fingerprint_of([model], "gguf_chunked", None, tmp_path)
    flip(model, start + 10)
    assert fingerprint_of([model], "gguf_chunked", None, tmp_path) != before


def test_arrays_of_arrays_are_skipped_over(tmp_path: Path) -> None:
    """Metadata of every type is walked through to the tensors."""
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("odd.nested", [[1, 2], [3]])
    writer.add_array("odd.texts", ["a", "b"])
    writer.add_float64("odd.double", 1.5)
    writer.add_bool("odd.flag", True)
    writer.add_tensor("one", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert len(fingerprint_of([path], "gguf_chunked", None, tmp_path)) == 32


@pytest.mark.parametrize("mode", ["safe", "gguf_chunked"])
def test_a_supplied_fingerprint_has_to_be_right(model: Path, tmp_path: Path, mode: str) -> None:
    """The right one is taken; a wrong one is refused with both."""
    right = fingerprint_of([model], mode, None, tmp_path)
    assert fingerprint_of([model], mode, right, tmp_path) == right
    with pytest.raises(BadModel, match=right.hex()):
        fingerprint_of([model], mode, b"\xaa" * 32, tmp_path)


def test_fast_unsafe_takes_the_callers_word(model: Path, tmp_path: Path) -> None:
    """Whatever it is."""
    assert fingerprint_of([model], "fast_unsafe", b"\xaa" * 32, tmp_path) == b"\xaa" * 32


def test_an_unchanged_file_is_not_read_again(model: Path, tmp_path: Path) -> None:
    """The second time no byte is read, so no progress is told."""
    told: list[float] = []
    first = fingerprint_of([model], "safe", None, tmp_path, told.append)
    assert told[-1] == 1.0
    told.clear()
    assert fingerprint_of([model], "safe", None, tmp_path, told.append) == first
    assert told == []


def test_a_file_that_only_looks_unchanged_is_read_again(model: Path, tmp_path: Path) -> None:
    """Same size, and its mtime set back: the ctime tells."""
    stat = model.stat()
    before = fingerprint_of([model], "safe", None, tmp_path)
    flip(model, -1)
    os.utime(model, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert fingerprint_of([model], "safe", None, tmp_path) != before


def test_a_damaged_note_is_made_anew(model: Path, tmp_path: Path) -> None:
    """The cache of digests is trusted in nothing but its contents' shape."""
    right = fingerprint_of([model], "safe", None, tmp_path)
    for note in (tmp_path / "fingerprints").iterdir():
        note.write_text("zz")
    assert fingerprint_of([model], "safe", None, tmp_path) == right


def test_a_directory_that_cannot_be_written_costs_only_time(model: Path, tmp_path: Path) -> None:
    """Without notes the answer is the same."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert fingerprint_of([model], "safe", None, blocked) == fingerprint_of([model], "safe", None, tmp_path)


def test_a_link_in_a_notes_place_is_not_followed(model: Path, tmp_path: Path) -> None:
    """What it points to stays as it was."""
    right = fingerprint_of([model], "safe", None, tmp_path)
    note = next((tmp_path / "fingerprints").iterdir())
    note.unlink()
    other = tmp_path / "other"
    other.write_text("mine")
    for name in (note.name, f"{note.name}.{os.getpid()}.tmp"):
        (note.parent / name).symlink_to(other)
    assert fingerprint_of([model], "safe", None, tmp_path) == right
    assert other.read_text() == "mine"


def test_every_part_of_a_split_model_counts(model: Path, tmp_path: Path) -> None:
    """A change in the second file changes the fingerprint of the whole."""
    second = tmp_path / "second.gguf"
    write_model("window", second)
    before = fingerprint_of([model, second], "safe", None, tmp_path)
    flip(second, -1)
    assert fingerprint_of([model, second], "safe", None, tmp_path) != before


@pytest.mark.parametrize("cut_at", [20, 100, 2000])
def test_a_file_that_ends_in_its_metadata_is_a_bad_model(model: Path, tmp_path: Path, cut_at: int) -> None:
    """Chunked reading says so, and does not loop or take what is there."""
    model.write_bytes(model.read_bytes()[:cut_at])
    with pytest.raises(BadModel, match="fingerprinted"):
        fingerprint_of([model], "gguf_chunked", None, tmp_path)
