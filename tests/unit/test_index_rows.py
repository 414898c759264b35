"""How rows look from outside (workers/index_rows.py)."""

import pytest

from barrel_inference.protocol import Tier
from barrel_inference.tiers import key as keys
from barrel_inference.tiers.catalog import Catalog
from barrel_inference.workers.index_rows import first_words, rows_of
from tests.unit.cache_rows import DISK, RAM, key, row


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"one two  three\nfour five six seven", "one two three four five six"),
        (keys.escape_control(7) + b"user\nHello" + keys.escape_control(0x0A0A0A0A) + b"you", "user Hello you"),
        (keys.escape_plain(b"a\xffb"), "a\ufffdb"),
        ("é漢".encode(), "é漢"),
        (b"\x1b[2Jgone \x07\x00", "[2Jgone"),
        (b"", ""),
    ],
)
def test_first_words(text: bytes, words: str) -> None:
    """Six words at most, without control tokens, and nothing that a terminal would obey."""
    assert first_words(text) == words


def test_rows_show_the_prompt() -> None:
    """Every row has the first words of its prompt, not of its own block; other servers' copies are left out."""
    catalog = Catalog()
    for server, kind in ((RAM, Tier.RAM), (DISK, Tier.DISK)):
        catalog.stored.open_tier(server, kind, 1000, 1, "")
        catalog.restore_row(row(b"", b"a b ", server=server), 0.0)
    catalog.restore_row(row(b"a b ", b"c d "), 0.0)
    words_of: dict[bytes, str] = {}
    rows = [
        one for node in catalog.latest(0) for one in rows_of(node, {DISK: Tier.DISK}, 1.0, words_of)
    ]  # fmt: skip
    assert {(one.key, one.first_words, one.text_bytes) for one in rows} == {
        (key(b"a b "), "a b", 4),
        (key(b"a b c d "), "a b", 8),
    }
