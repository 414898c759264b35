"""From what a caller names to files, mappings and quantisations."""

import pytest

from barrel_inference.errors import BadModel
from barrel_inference.workers.model.model_path import as_text, from_text, part_names
from barrel_inference.workers.model.quant import quant_of
from barrel_inference.workers.model.residency import Mapping, mappings_of, resident_runs


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("m.gguf", ["m.gguf"]),
        ("m-00001-of-00003.gguf", ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]),
        ("m-00002-of-00002.gguf", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
        ("m-1-of-2.gguf", ["m-1-of-2.gguf"]),
    ],
)
def test_parts_of_a_split_model(name: str, parts: list[str]) -> None:
    """Any part names all of them, in order."""
    assert part_names(name) == parts


@pytest.mark.parametrize(
    ("path", "text"),
    [("/m.gguf", "/m.gguf"), ("/é %FF", "/é %FF"), ("/a b\udcff%?#.gguf", "file:///a%20b%FF%25%3F%23.gguf")],
)
def test_every_path_can_be_sent(path: str, text: str) -> None:
    """One that is no UTF-8 as a URI, the others as they are; both come back as they were."""
    assert as_text(path) == text
    assert from_text(text) == path


@pytest.mark.parametrize("text", ["/m\0", "file:///m%00"])
def test_a_path_has_no_nul(text: str) -> None:
    """The kernel would see another, shorter one."""
    with pytest.raises(BadModel, match="NUL"):
        from_text(text)


@pytest.mark.parametrize(
    ("file_type", "quant"),
    [(0, ("f32", 32)), (1, ("f16", 16)), (15, ("q4_k_m", 4)), (1024 | 7, ("q8_0", 8)), (999, ("type_999", 32))],
)
def test_quantisations_are_named(file_type: int, quant: tuple[str, int]) -> None:
    """Known types by name, guessed ones too; an unknown one stays distinct."""
    assert quant_of(file_type) == quant


MAPS = """\
55d0a000-55d0b000 r--p 00000000 fd:01 131 /usr/bin/python3
7f0000000000-7f0000200000 r--s 00000000 08:02 4711 /models/a model.gguf
7f0000200000-7f0000300000 r--s 00200000 08:02 4711 /models/a model.gguf
7f0001000000-7f0001100000 r--s 00000000 08:03 4711 /other/disk.gguf
7f0002000000-7f0002100000 rw-p 00000000 00:00 0
"""


def test_mappings_are_found_by_device_and_inode() -> None:
    """Names may repeat, have blanks or be gone; the inode of a device is the file."""
    assert mappings_of(MAPS, [(8, 2, 4711)]) == [
        Mapping(0x7F0000000000, 0x7F0000200000),
        Mapping(0x7F0000200000, 0x7F0000300000),
    ]
    assert mappings_of(MAPS, [(1, 1, 1)]) == []


@pytest.mark.parametrize(
    ("present", "runs"),
    [(b"", []), (b"\0\0", []), (b"\1\1", [(0, 2)]), (b"\0\1\1\0\1", [(1, 3), (4, 5)]), (b"\2\3", [(1, 2)])],
)
def test_resident_pages_are_grouped(present: bytes, runs: list[tuple[int, int]]) -> None:
    """Runs of pages whose lowest bit is set; the other bits are reserved."""
    assert resident_runs(present) == runs
