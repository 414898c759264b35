"""The image of one cached node: the same bytes in a RAM slab, in a staging slab and in a file. Pure.

All numbers are little-endian. Sections are aligned to 64 bytes; the gaps are zeros and lie under the checksum before them,
so that a flipped byte anywhere outside the trailer is noticed.

    offset  bytes  field
    0       8      magic 89 4B 56 43 0D 0A 1A 0A; wiped when a slab is freed
    8       4      version, u32: 1
    12      4      flags, u32: 1 = has a snapshot, 2 = saved pinned, 4 = has a parent
    16      4      save reason, u32: see REASON_NUMBERS
    20      4      tokens before this node (start), u32
    24      4      tokens in this node, u32
    28      4      bytes of the metadata, u32
    32      32     key
    64      32     parent's key, zeros without one
    96      8      offset of the payload, u64
    104     8      bytes of the cells section, u64
    112     8      bytes of the snapshot section, u64
    120     8      time of saving, seconds since the epoch, f64
    128     16     XXH3-128 of the payload, from its offset to the trailer
    144     8      bytes of the logits section, u64; 0 = there is none
    152     8      zeros
    160     16     XXH3-128 of bytes 0 to 160, then of bytes 192 to the payload
    176     16     zeros (not under a checksum, checked to be zero)
    192     ...    metadata, a msgpack map: identity, token ids, token lengths, text; zeros to a multiple of 64
    ...     ...    payload: cells, snapshot, logits, each followed by zeros to a multiple of 64
    ...     1024   trailer, rewritten in place while the image lives

Trailer, outside both checksums and with its own; one that does not check is ignored:

    0       4      magic "KVCT"
    4       4      number of marks, u32
    8       8      last use, seconds since the epoch, f64
    16      4      hits, u32
    20      4      flags, u32: 1 = pinned
    24      16     XXH3-128 of bytes 0 to 24, then of bytes 40 to 1024
    40      24×40  marks: key 32, tokens from the root u32, save reason u16, flags u16 (1 = pinned)
    1000    24     zeros

The logits are those after the node's last token, as the engine has them: for llama.cpp an f32 for each token of the vocabulary.

A digest is XXH3's canonical form (big-endian), as `xxh128sum` prints it.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from xxhash import xxh3_128

from barrel_inference.protocol import Namespace, SaveReason

MAGIC = b"\x89KVC\r\n\x1a\n"
VERSION = 1
HEADER_BYTES = 192
TRAILER_BYTES = 1024
TRAILER_MAGIC = b"KVCT"
# Of sections, so that an importer reads aligned words; also the grain of slabs.
ALIGN_BYTES = 64
# Marks one trailer holds; pinned ones are kept first, a lost mark costs a shortcut only.
MAX_MARKS = 24
# Far above one node's text (256 tokens), far below what would hurt a scan.
MAX_META_BYTES = 16 * 1024 * 1024

# Numbers on disk: append only.
REASON_NUMBERS = {
    SaveReason.COLD: 1,
    SaveReason.CONTINUED: 2,
    SaveReason.FINISH: 3,
    SaveReason.EVICT: 4,
    SaveReason.SHUTDOWN: 5,
    SaveReason.AGENT_PREFIX: 6,
}
_REASONS = {number: reason for reason, number in REASON_NUMBERS.items()}

_HAS_SNAPSHOT, _PINNED, _HAS_PARENT = 1, 2, 4
_NO_KEY = bytes(32)

_HEADER = struct.Struct("<8sIIIIII32s32sQQQd16sQ8x16s16x")
_CHECKED_BYTES = 160
_TRAILER = struct.Struct("<4sIdII16s")
_MARK = struct.Struct("<32sIHH")
assert _HEADER.size == HEADER_BYTES
assert _TRAILER.size + MAX_MARKS * _MARK.size <= TRAILER_BYTES


class CorruptImage(Exception):
    """These bytes are not the image that was asked for; `reason` says in a few words what is wrong."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Meta:
    """What an image says about itself."""

    namespace: Namespace
    model_id: str
    key: bytes
    parent_key: bytes | None
    start_tokens: int
    token_ids: bytes  # u32 little-endian, one per token
    token_bytes: bytes  # u32 little-endian: the rendered length of each token
    text: bytes
    reason: SaveReason
    snapshot: bool
    pinned: bool  # when it was saved; the trailer has the present state
    created_unix_s: float
    software: str = ""  # who wrote it, for people


class Layout(NamedTuple):
    """Where the parts of one image lie."""

    meta_bytes: int
    payload_offset: int
    cells_bytes: int
    snapshot_bytes: int
    logits_bytes: int

    @property
    def snapshot_offset(self) -> int:
        """Where the snapshot section starts."""
        return self.payload_offset + _aligned(self.cells_bytes)

    @property
    def logits_offset(self) -> int:
        """Where the logits section starts."""
        return self.snapshot_offset + _aligned(self.snapshot_bytes)

    @property
    def trailer_offset(self) -> int:
        """Where the trailer starts, which is where the payload's checksum ends."""
        return self.logits_offset + _aligned(self.logits_bytes)

    @property
    def size_bytes(self) -> int:
        """Of the whole image; a multiple of 64."""
        return self.trailer_offset + TRAILER_BYTES

    def cells(self, view: memoryview) -> memoryview:
        """The cells section, to write into or to read from."""
        return view[self.payload_offset : self.payload_offset + self.cells_bytes]

    def snapshot(self, view: memoryview) -> memoryview:
        """The snapshot section, to write into or to read from."""
        return view[self.snapshot_offset : self.snapshot_offset + self.snapshot_bytes]

    def logits(self, view: memoryview) -> memoryview:
        """The logits section, to write into or to read from."""
        return view[self.logits_offset : self.logits_offset + self.logits_bytes]


class Mark(NamedTuple):
    """A named point inside or at the end of a node, in the order of the wire's tuples."""

    key: bytes
    tokens: int  # from the root
    reason: str
    pinned: bool


class Trailer(NamedTuple):
    """What changes while an image lives."""

    last_used_unix_s: float
    hits: int
    pinned: bool
    marks: tuple[Mark, ...] = ()


class Image(NamedTuple):
    """An image whose header, metadata and payload were verified; the sections are views of the caller's bytes."""

    meta: Meta
    cells: memoryview
    snapshot: memoryview
    logits: memoryview


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The metadata map."""

    fingerprint: bytes
    quant: str
    ctx_params_hash: bytes
    salt: bytes
    model_id: str
    token_ids: bytes
    token_bytes: bytes
    text: bytes
    software: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Body)


class _Header(NamedTuple):
    """The fixed header, unpacked."""

    magic: bytes
    version: int
    flags: int
    reason: int
    start_tokens: int
    tokens: int
    meta_bytes: int
    key: bytes
    parent_key: bytes
    payload_offset: int
    cells_bytes: int
    snapshot_bytes: int
    created_unix_s: float
    payload_digest: bytes
    logits_bytes: int
    header_digest: bytes

    def layout(self) -> Layout:
        return Layout(self.meta_bytes, self.payload_offset, self.cells_bytes, self.snapshot_bytes, self.logits_bytes)


# --- writing -----------------------------------------------------------------------------------------------------------


def layout(meta: Meta, cells_bytes: int, snapshot_bytes: int = 0, logits_bytes: int = 0) -> Layout:
    """Where the parts of an image with this metadata and these sections will lie; `size_bytes` is the room it takes."""
    meta_bytes = len(_encoder.encode(_body(meta)))
    return Layout(meta_bytes, _aligned(HEADER_BYTES + meta_bytes), cells_bytes, snapshot_bytes, logits_bytes)


def seal(view: memoryview, meta: Meta, layout: Layout) -> None:
    """Complete an image whose payload sections are in place already.

    The magic goes in last: bytes that were left half-sealed never look like an image.
    """
    view = view.cast("B")
    body = _encoder.encode(_body(meta))
    assert len(body) == layout.meta_bytes
    assert len(view) == layout.size_bytes
    invalidate(view)
    # A recycled slab holds other people's bytes; none of them may travel along in a gap.
    _zero(view, HEADER_BYTES + len(body), layout.payload_offset)
    _zero(view, layout.payload_offset + layout.cells_bytes, layout.snapshot_offset)
    _zero(view, layout.snapshot_offset + layout.snapshot_bytes, layout.logits_offset)
    _zero(view, layout.logits_offset + layout.logits_bytes, layout.trailer_offset)
    view[HEADER_BYTES : HEADER_BYTES + len(body)] = body
    trailer = Trailer(last_used_unix_s=meta.created_unix_s, hits=0, pinned=meta.pinned)
    view[layout.trailer_offset :] = pack_trailer(trailer)
    payload_digest = xxh3_128(view[layout.payload_offset : layout.trailer_offset]).digest()
    header = _HEADER.pack(
        MAGIC, VERSION, _flags(meta), REASON_NUMBERS[meta.reason], meta.start_tokens, len(meta.token_ids) // 4,
        len(body), meta.key, meta.parent_key or _NO_KEY, layout.payload_offset, layout.cells_bytes,
        layout.snapshot_bytes, meta.created_unix_s, payload_digest, layout.logits_bytes, bytes(16),
    )  # fmt: skip
    digest = _header_digest(header, view[HEADER_BYTES : layout.payload_offset])
    header = header[:_CHECKED_BYTES] + digest + header[_CHECKED_BYTES + len(digest) :]
    view[len(MAGIC) : HEADER_BYTES] = header[len(MAGIC) :]
    view[: len(MAGIC)] = MAGIC


def invalidate(view: memoryview) -> None:
    """Wipe the magic: readers of this slab find out that it is not theirs any more."""
    view[: len(MAGIC)] = bytes(len(MAGIC))


def marks_of(wire: Sequence[tuple[bytes, int, str, bool]]) -> tuple[Mark, ...]:
    """Marks as a message had them; what no trailer can hold is left out."""
    marks = (Mark(*mark) for mark in wire)
    return tuple(m for m in marks if len(m.key) == 32 and 0 <= m.tokens < 2**32 and m.reason in REASON_NUMBERS)


def pack_trailer(trailer: Trailer) -> bytes:
    """The trailer's bytes; of more than `MAX_MARKS` marks the pinned and then the last ones are kept."""
    marks = _kept_marks(trailer.marks)
    packed = b"".join(
        _MARK.pack(mark.key, mark.tokens, REASON_NUMBERS[SaveReason(mark.reason)], int(mark.pinned)) for mark in marks
    )
    rest = packed.ljust(TRAILER_BYTES - _TRAILER.size, b"\0")
    head = _TRAILER.pack(
        TRAILER_MAGIC,
        len(marks),
        trailer.last_used_unix_s,
        min(max(trailer.hits, 0), 2**32 - 1),
        int(trailer.pinned),
        b"",
    )[:24]
    return head + xxh3_128(head + rest).digest() + rest


# --- reading -----------------------------------------------------------------------------------------------------------


def open_image(view: memoryview, key: bytes) -> Image:
    """The verified image of `key` in these bytes.

    Raises:
        CorruptImage: not an image, not this key's, not whole, or changed since it was sealed.
    """
    view = view.cast("B")
    header = _parse_header(bytes(view[:HEADER_BYTES]))
    if header.key != key:
        raise CorruptImage("another key")
    where = header.layout()
    if where.size_bytes != len(view):
        raise CorruptImage(f"{len(view)} bytes, the header says {where.size_bytes}")
    meta = _parse_meta(header, bytes(view[: where.payload_offset]))
    if xxh3_128(view[where.payload_offset : where.trailer_offset]).digest() != header.payload_digest:
        raise CorruptImage("payload checksum")
    return Image(meta, where.cells(view), where.snapshot(view), where.logits(view))


def prefix_bytes(header: bytes) -> int:
    """How many bytes from the start hold header and metadata, told by the first 192.

    Raises:
        CorruptImage: the header is not one, or names impossible sizes.
    """
    return _parse_header(header).payload_offset


def trailer_offset(header: bytes) -> int:
    """Where the trailer lies, told by the first 192 bytes; raises as `prefix_bytes` does."""
    return _parse_header(header).layout().trailer_offset


def read_meta(prefix: bytes, file_bytes: int, trailer: bytes = b"") -> tuple[Meta, Layout, Trailer]:
    """What a scan learns without reading the payload, from the first bytes and the trailer of a file that long.

    Raises:
        CorruptImage: the header or the metadata is damaged, or the file has another length than the header says.
    """
    header = _parse_header(prefix)
    where = header.layout()
    if where.size_bytes != file_bytes:
        raise CorruptImage(f"{file_bytes} bytes, the header says {where.size_bytes}")
    meta = _parse_meta(header, prefix)
    return meta, where, unpack_trailer(trailer) or Trailer(meta.created_unix_s, 0, meta.pinned)


def unpack_trailer(packed: bytes) -> Trailer | None:
    """The trailer, or None when it is damaged: recency is not worth a row."""
    if len(packed) != TRAILER_BYTES or packed[24:40] != xxh3_128(packed[:24] + packed[40:]).digest():
        return None
    magic, count, last_used_unix_s, hits, flags, _digest = _TRAILER.unpack_from(packed)
    if magic != TRAILER_MAGIC or count > MAX_MARKS or not math.isfinite(last_used_unix_s):
        return None
    marks = []
    for number in range(count):
        key, tokens, reason, mark_flags = _MARK.unpack_from(packed, _TRAILER.size + number * _MARK.size)
        if reason in _REASONS:
            marks.append(Mark(key, tokens, _REASONS[reason], bool(mark_flags & 1)))
    return Trailer(last_used_unix_s, hits, bool(flags & 1), tuple(marks))


def header_fingerprint(view: memoryview) -> bytes:
    """The fixed header's bytes. Equal before and after an import: the slab was this image all the while."""
    return bytes(view[:HEADER_BYTES])


# --- parts ---------------------------------------------------------------------------------------------------------------


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _zero(view: memoryview, start: int, end: int) -> None:
    view[start:end] = bytes(end - start)


def _flags(meta: Meta) -> int:
    has_parent = meta.parent_key is not None
    return _HAS_SNAPSHOT * meta.snapshot | _PINNED * meta.pinned | _HAS_PARENT * has_parent


def _body(meta: Meta) -> _Body:
    space = meta.namespace
    return _Body(
        space.fingerprint, space.quant, space.ctx_params_hash, space.salt,
        meta.model_id, meta.token_ids, meta.token_bytes, meta.text, meta.software,
    )  # fmt: skip


def _header_digest(header: bytes, meta: bytes | memoryview) -> bytes:
    digest = xxh3_128(header[:_CHECKED_BYTES])
    digest.update(meta)
    return digest.digest()


def _kept_marks(marks: Sequence[Mark]) -> Sequence[Mark]:
    if len(marks) <= MAX_MARKS:
        return marks
    pinned = [mark for mark in marks if mark.pinned][-MAX_MARKS:]
    others = [mark for mark in marks if not mark.pinned]
    room = MAX_MARKS - len(pinned)
    return pinned + (others[-room:] if room else [])


def _parse_header(prefix: bytes) -> _Header:
    """The header, its sizes checked against each other: what follows may slice by them."""
    if len(prefix) < HEADER_BYTES:
        raise CorruptImage(f"only {len(prefix)} bytes, a header has {HEADER_BYTES}")
    if prefix[:8] != MAGIC:
        raise CorruptImage("no magic")
    header = _Header._make(_HEADER.unpack_from(prefix))
    if header.version != VERSION:
        raise CorruptImage(f"unsupported version {header.version}")
    if header.meta_bytes > MAX_META_BYTES or header.payload_offset != _aligned(HEADER_BYTES + header.meta_bytes):
        raise CorruptImage("payload offset")
    if any(prefix[_CHECKED_BYTES + 16 : HEADER_BYTES]):
        raise CorruptImage("header padding")
    return header


def _parse_meta(header: _Header, prefix: bytes) -> Meta:
    """The metadata of a checked header; `prefix` starts with the header and has the metadata behind it."""
    if len(prefix) < header.payload_offset:
        raise CorruptImage("metadata cut off")
    if _header_digest(prefix[:HEADER_BYTES], prefix[HEADER_BYTES : header.payload_offset]) != header.header_digest:
        raise CorruptImage("header checksum")
    try:
        body = _decoder.decode(prefix[HEADER_BYTES : HEADER_BYTES + header.meta_bytes])
    except (msgspec.MsgspecError, UnicodeDecodeError) as bad:
        raise CorruptImage(f"metadata: {bad}") from bad
    reason = _REASONS.get(header.reason)
    if reason is None:
        raise CorruptImage(f"save reason {header.reason}")
    if not len(body.token_ids) == len(body.token_bytes) == 4 * header.tokens:
        raise CorruptImage("token count")
    return Meta(
        namespace=Namespace(
            fingerprint=body.fingerprint, quant=body.quant, ctx_params_hash=body.ctx_params_hash, salt=body.salt
        ),
        model_id=body.model_id,
        key=header.key,
        parent_key=header.parent_key if header.flags & _HAS_PARENT else None,
        start_tokens=header.start_tokens,
        token_ids=body.token_ids,
        token_bytes=body.token_bytes,
        text=body.text,
        reason=reason,
        snapshot=bool(header.flags & _HAS_SNAPSHOT),
        pinned=bool(header.flags & _PINNED),
        created_unix_s=header.created_unix_s,
        software=body.software,
    )
