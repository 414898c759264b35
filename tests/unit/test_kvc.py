"""The image format: what was sealed comes back, and no damaged byte goes unnoticed."""

import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barrel_inference.protocol import Namespace, SaveReason
from barrel_inference.tiers import kvc
from barrel_inference.tiers.kvc import CorruptImage, Mark, Meta, Trailer

KEY = bytes(range(32))
PARENT = bytes(reversed(range(32)))
GOLDEN = Path(__file__).parent.parent / "golden"


def u32(values: list[int]) -> bytes:
    """Numbers as images hold them."""
    return struct.pack(f"<{len(values)}I", *values)


META = Meta(
    namespace=Namespace(fingerprint=b"\xaa" * 32, quant="f16:16", ctx_params_hash=b"\xbb" * 32, salt=b""),
    model_id="tiny",
    key=KEY,
    parent_key=None,
    start_tokens=0,
    token_ids=u32([1, 2, 3, 4, 5]),
    token_bytes=u32([1, 1, 1, 1, 1]),
    text=b"hello",
    reason=SaveReason.COLD,
    snapshot=False,
    pinned=False,
    created_unix_s=1234567890.0,
    software="0.1.0",
)


CHILD = replace(META, parent_key=PARENT, start_tokens=256, snapshot=True)


def sealed(meta: Meta, cells: bytes, snapshot: bytes = b"", logits: bytes = b"") -> bytearray:
    """A whole image, in a slab that held something else before."""
    where = kvc.layout(meta, len(cells), len(snapshot), len(logits))
    slab = bytearray(b"\xee" * where.size_bytes)
    view = memoryview(slab)
    where.cells(view)[:] = cells
    where.snapshot(view)[:] = snapshot
    where.logits(view)[:] = logits
    kvc.seal(view, meta, where)
    return slab


def scanned(slab: bytes | bytearray, size_bytes: int | None = None) -> tuple[Meta, kvc.Layout, Trailer]:
    """What a scan reads of a file with these bytes."""
    end = kvc.prefix_bytes(bytes(slab[: kvc.HEADER_BYTES]))
    at = kvc.trailer_offset(bytes(slab[: kvc.HEADER_BYTES]))
    return kvc.read_meta(bytes(slab[:end]), size_bytes or len(slab), bytes(slab[at:]))


def test_every_field_comes_back() -> None:
    """A parsed image has the metadata, the tokens in order and the bytes that were sealed."""
    got = kvc.open_image(memoryview(sealed(META, b"original payload")), KEY)
    assert got.meta == META
    assert (bytes(got.cells), bytes(got.snapshot), bytes(got.logits)) == (b"original payload", b"", b"")


def test_snapshot_and_parent_come_back() -> None:
    """A child with a snapshot and logits keeps all sections, its parent and its flags."""
    meta = replace(
        META, parent_key=PARENT, start_tokens=256, snapshot=True, pinned=True, reason=SaveReason.AGENT_PREFIX
    )
    got = kvc.open_image(memoryview(sealed(meta, b"", b"state", b"row")), KEY)
    assert got.meta == meta
    assert (bytes(got.cells), bytes(got.snapshot), bytes(got.logits)) == (b"", b"state", b"row")


@pytest.mark.parametrize(
    ("name", "meta", "cells", "snapshot", "logits"),
    [
        ("root.kvc", META, b"original payload", b"", b""),
        ("child.kvc", CHILD, b"cells" * 30, b"state", b""),
        ("logits.kvc", CHILD, b"cells" * 30, b"state", b"logits" * 20),
    ],
)
def test_bytes_are_those_of_version_1(name: str, meta: Meta, cells: bytes, snapshot: bytes, logits: bytes) -> None:
    """Files that were written by the first release are read and written byte by byte as they are."""
    want = (GOLDEN / name).read_bytes()
    assert bytes(sealed(meta, cells, snapshot, logits)) == want
    assert kvc.open_image(memoryview(want), KEY).meta == meta


def test_gaps_hold_nothing_of_the_slab_before() -> None:
    """A recycled slab's old bytes do not travel along between the sections."""
    assert b"\xee" not in sealed(META, b"x" * 100, b"y" * 10, b"z" * 70)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda b: b"GGUF" + b[4:], "no magic"),
        (lambda b: b[:8] + struct.pack("<I", 99) + b[12:], "unsupported version 99"),
        (lambda b: b[:40], "only 40 bytes"),
        (lambda b: b[:-1], "the header says"),
        (lambda b: b + b"\0", "the header says"),
        (lambda b: b.replace(b"original payload", b"tampered payload"), "payload checksum"),
        (lambda b: b.replace(b"hello", b"jello"), "header checksum"),
    ],
)
def test_damage_is_named(damage: object, reason: str) -> None:
    """What is wrong with an image is said in a few words."""
    assert callable(damage)
    with pytest.raises(CorruptImage, match=reason):
        kvc.open_image(memoryview(damage(bytes(sealed(META, b"original payload")))), KEY)


def test_scan_does_not_read_the_payload() -> None:
    """A tampered payload of equal length is found by a reader, not by a scan."""
    slab = sealed(META, b"original payload").replace(b"original payload", b"tampered payload")
    assert scanned(slab)[0] == META


def test_scan_notices_a_cut_file() -> None:
    """A file of another length than its header says is corrupt."""
    slab = sealed(META, b"original payload")
    with pytest.raises(CorruptImage):
        scanned(slab, len(slab) - 1)


def test_every_flipped_byte_is_noticed() -> None:
    """Outside the trailer there is no byte that can change without the reader or the key noticing."""
    slab = sealed(META, b"original payload", b"st", b"row")
    where = scanned(slab)[1]
    for at in range(where.trailer_offset):
        slab[at] ^= 0x40
        with pytest.raises(CorruptImage):
            kvc.open_image(memoryview(slab), KEY)
        slab[at] ^= 0x40
    assert kvc.open_image(memoryview(slab), KEY).meta == META


def test_trailer_comes_back_with_a_scan() -> None:
    """Recency, hits, pin and marks are what the trailer was rewritten to."""
    slab = sealed(META, b"payload")
    want = Trailer(1234567990.5, 7, True, (Mark(PARENT, 5, "finish", False), Mark(KEY, 3, "agent_prefix", True)))
    slab[-kvc.TRAILER_BYTES :] = kvc.pack_trailer(want)
    assert scanned(slab)[2] == want
    assert kvc.open_image(memoryview(slab), KEY).meta == META


def test_damaged_trailer_is_ignored() -> None:
    """A torn trailer costs recency and marks, never the row."""
    meta = replace(META, pinned=True)
    slab = sealed(meta, b"payload")
    slab[-kvc.TRAILER_BYTES :] = kvc.pack_trailer(Trailer(1.0, 7, False))
    slab[-500] ^= 1
    assert scanned(slab)[2] == Trailer(meta.created_unix_s, 0, True)


def test_too_many_marks_keep_the_pinned_ones() -> None:
    """When marks do not fit, pinned ones stay and the last of the others."""
    marks = tuple(Mark(bytes([n]) * 32, n, "finish", n == 0) for n in range(40))
    got = kvc.unpack_trailer(kvc.pack_trailer(Trailer(1.0, 0, False, marks)))
    assert got is not None
    assert got.marks == (marks[0], *marks[-23:])


def test_freed_slab_does_not_open() -> None:
    """After `invalidate` a reader's fingerprint differs and the image does not open."""
    slab = memoryview(sealed(META, b"payload"))
    before = kvc.header_fingerprint(slab)
    kvc.invalidate(slab)
    assert kvc.header_fingerprint(slab) != before
    with pytest.raises(CorruptImage, match="no magic"):
        kvc.open_image(slab, KEY)


TOKENS = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=5)), max_size=300)


@given(
    tokens=TOKENS,
    cells=st.binary(max_size=300),
    snapshot=st.binary(max_size=100),
    logits=st.binary(max_size=100),
    key=st.binary(min_size=32, max_size=32),
    other=st.binary(min_size=32, max_size=32),
    quant=st.text(max_size=10),
    reason=st.sampled_from(SaveReason),
)
@settings(max_examples=60, deadline=None)
def test_round_trip(
    tokens: list[tuple[int, bytes]],
    cells: bytes,
    snapshot: bytes,
    logits: bytes,
    key: bytes,
    other: bytes,
    quant: str,
    reason: SaveReason,
) -> None:
    """Whatever was sealed comes back in a full parse and in a scan, and under no other key."""
    meta = replace(
        META,
        namespace=Namespace(fingerprint=key, quant=quant, ctx_params_hash=other, salt=cells),
        key=key,
        token_ids=u32([token for token, _ in tokens]),
        token_bytes=u32([len(text) for _, text in tokens]),
        text=b"".join(text for _, text in tokens),
        reason=reason,
    )
    slab = sealed(meta, cells, snapshot, logits)
    got = kvc.open_image(memoryview(slab), key)
    assert (got.meta, bytes(got.cells), bytes(got.snapshot), bytes(got.logits)) == (meta, cells, snapshot, logits)
    assert scanned(slab)[0] == meta
    if other != key:
        with pytest.raises(CorruptImage, match="another key"):
            kvc.open_image(memoryview(slab), other)


@given(junk=st.binary(max_size=600), start=st.sampled_from([b"", kvc.MAGIC, kvc.MAGIC + b"\1\0\0\0"]))
@settings(max_examples=200, deadline=None)
def test_junk_is_refused(junk: bytes, start: bytes) -> None:
    """Bytes that nobody sealed are `CorruptImage`, whatever they are."""
    with pytest.raises(CorruptImage):
        kvc.open_image(memoryview(start + junk), KEY)
    with pytest.raises(CorruptImage):
        kvc.read_meta(start + junk, len(junk))
    kvc.unpack_trailer(start + junk)


@given(at=st.integers(0, kvc.HEADER_BYTES - 1), value=st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_scan_survives_any_header_byte(at: int, value: int) -> None:
    """A changed header byte is either the byte that was there or `CorruptImage`, never another metadata."""
    slab = sealed(META, b"payload")
    slab[at] = value
    try:
        got = scanned(slab)[0]
    except CorruptImage:
        return
    assert got == META
