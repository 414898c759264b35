"""The index's nodes and reservations as others see them: rows of a dump, and what a tier keeps in a trailer. Pure.

A row is a copy of a node, or a mark in it. A mark has no bytes of its own.
"""

import re
from collections.abc import Mapping

from barrel_inference import protocol
from barrel_inference.protocol import Location, SaveReason, Tier
from barrel_inference.tiers.prefix_tree import Node
from barrel_inference.tiers.reservations import Reservation
from barrel_inference.tiers.stored import bytes_inside

FIRST_WORDS = 6
FIRST_BYTES = 200  # of a text, to look for its first words in
_CONTROL_TOKEN = re.compile(rb"\xff\x01.{4}", re.DOTALL)  # as tiers/key.py writes it


def touch_of(node: Node, location: Location) -> protocol.Touch:
    """What a tier keeps beside an image."""
    return protocol.Touch(
        location=location, last_used_unix_s=node.last_used_unix_s, hits=round(node.hits),
        marks=[(mark.key, mark.tokens, mark.reason.value, mark.pinned) for mark in node.marks], pinned=node.pinned,
    )  # fmt: skip


def first_words(text: bytes) -> str:
    """The first words of rendered bytes as one may print them; control tokens are left out."""
    plain = _CONTROL_TOKEN.sub(b" ", text[:FIRST_BYTES]).replace(b"\xff\x00", b"\xff").decode(errors="replace")
    # What is not printable could be an order to the reader's terminal.
    words = "".join(character if character.isprintable() else " " for character in plain).split()
    return " ".join(words[:FIRST_WORDS])


def rows_of(node: Node, kinds: Mapping[str, Tier], now_s: float, words_of: dict[bytes, str]) -> list[protocol.DumpRow]:
    """The rows of a node: each copy on the servers in `kinds`, and the marks in each. `words_of` keeps the first words of
    prompts between the calls of one dump."""
    words = _prompt_words(node, words_of)
    age_s = max(0.0, now_s - node.last_used_unix_s)
    start_bytes = node.text_end - len(node.text)
    rows = []
    for location in node.copies.values():
        if location.server not in kinds:
            continue

        def row(
            key: bytes, tokens: int, text_bytes: int, reason: SaveReason, pinned: bool, size_bytes: int,
            location: Location = location,
        ) -> protocol.DumpRow:  # fmt: skip
            return protocol.DumpRow(
                key=key, parent_key=node.parent_key, model_id=node.model_id, tier=kinds[location.server].value,
                size_bytes=size_bytes, tokens=tokens, text_bytes=text_bytes, status="available", reason=reason.value,
                hits=round(node.hits), refcount=node.claims, pinned=pinned, age_s=age_s,
                location=location.name or f"offset {location.offset}", first_words=words,
            )  # fmt: skip

        rows.append(row(node.key, node.end_tokens, node.text_end, node.reason, node.is_pinned, location.size_bytes))
        for mark in node.marks:
            text_bytes = start_bytes + bytes_inside(node, mark.tokens)
            rows.append(row(mark.key, mark.tokens, text_bytes, mark.reason, mark.pinned, 0))
    return rows


def _prompt_words(node: Node, words_of: dict[bytes, str]) -> str:
    """The first words of the prompt that a node belongs to: those of its root."""
    path = [node]
    while path[-1].key not in words_of and path[-1].parent is not None:
        path.append(path[-1].parent)
    top = path[-1]
    words = words_of.get(top.key)
    if words is None:
        words = first_words(top.text)
    words_of.update((below.key, words) for below in path)
    return words


def writing_row(reservation: Reservation, kind: Tier, text_bytes: int) -> protocol.DumpRow:
    """A node on its way; `text_bytes` of the whole prefix."""
    new = reservation.node
    return protocol.DumpRow(
        key=new.key, parent_key=new.parent_key, model_id=reservation.model_id, tier=kind.value, size_bytes=new.size_bytes,
        tokens=reservation.end_tokens, text_bytes=text_bytes, status="writing",
        reason=new.reason.value, hits=0, refcount=0, pinned=new.pinned, age_s=0.0, location="",
        first_words=first_words(new.text) if new.parent_key is None else "",
    )  # fmt: skip
