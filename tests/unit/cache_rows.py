"""Rows and nodes for the tests of the index's pure parts: tokens are single bytes, or two-byte words."""

from collections.abc import Sequence

from barrel_inference.protocol import Location, Namespace, NewNode, SaveReason, StoredRow
from barrel_inference.tiers import key as keys

SPACE = Namespace(b"\xaa" * 32, "f16/16", b"\xbb" * 32)
OTHER = Namespace(b"\xcc" * 32, "f16/16", b"\xbb" * 32)
RAM, DISK = "tier:ram", "tier:disk"


def key(text: bytes, space: Namespace = SPACE) -> bytes:
    """The key of a prefix."""
    return keys.key_of(space, text)


def row(
    prefix: bytes, text: bytes, *, server: str = DISK, size_bytes: int = 10, used_s: float = 0.0, hits: int = 0,
    pinned: bool = False, marks: Sequence[tuple[bytes, int, str, bool]] = (), space: Namespace = SPACE,
    snapshot: bool = False, incarnation: int = 1,
) -> StoredRow:  # fmt: skip
    """A node that goes on from `prefix` with `text`, one token a byte."""
    own = key(prefix + text, space)
    return StoredRow(
        namespace=space, model_id="m", key=own, parent_key=key(prefix, space) if prefix else None,
        start_tokens=len(prefix), token_ids=keys.pack_u32(text), token_bytes=keys.pack_u32([1] * len(text)), text=text,
        reason=SaveReason.COLD, snapshot=snapshot, created_unix_s=0.0, last_used_unix_s=used_s, hits=hits,
        marks=list(marks), pinned=pinned,
        location=Location(
            server, incarnation, size_bytes, 0 if server == DISK else _offset(own), own.hex() if server == DISK else ""
        ),
    )  # fmt: skip


def new(
    prefix: bytes, text: bytes, *, size_bytes: int = 10, reason: SaveReason = SaveReason.COLD, pinned: bool = False,
    space: Namespace = SPACE,
) -> NewNode:  # fmt: skip
    """A node to be saved, one token a byte."""
    return NewNode(
        key=key(prefix + text, space), parent_key=key(prefix, space) if prefix else None, start_tokens=len(prefix),
        token_ids=keys.pack_u32(text), token_bytes=keys.pack_u32([1] * len(text)), text=text, size_bytes=size_bytes,
        reason=reason, pinned=pinned,
    )  # fmt: skip


def _offset(own: bytes) -> int:
    return int.from_bytes(own[:4], "little") * 64
