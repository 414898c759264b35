"""Cache keys: what goes in, and that nothing else can look the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barrel_inference.protocol import Namespace
from barrel_inference.tiers import key as keys

SPACE = Namespace(b"\xaa" * 32, "f16", b"\xbb" * 32)


def test_same_input_same_key() -> None:
    """The key of a text is 32 bytes, and the same whether it is hashed at once or piece by piece."""
    digest = keys.start(SPACE)
    for piece in (b"hel", b"", b"lo world"):
        digest.update(piece)
    assert keys.key_of(SPACE, b"hello world") == digest.digest()
    assert len(digest.digest()) == 32


@pytest.mark.parametrize(
    "other",
    [
        Namespace(b"\xab" * 32, "f16", b"\xbb" * 32),
        Namespace(b"\xaa" * 32, "q4_k_m", b"\xbb" * 32),
        Namespace(b"\xaa" * 32, "f16", b"\xbc" * 32),
        Namespace(b"\xaa" * 32, "f16", b"\xbb" * 32, b"tenant"),
    ],
)
def test_each_field_separates(other: Namespace) -> None:
    """A difference in any field of the namespace gives another namespace and another key."""
    assert keys.namespace_id(other) == keys.namespace_id(other)
    assert keys.namespace_id(other) != keys.namespace_id(SPACE)
    assert keys.key_of(other, b"1 2 3") != keys.key_of(SPACE, b"1 2 3")


def test_fields_do_not_run_together() -> None:
    """Bytes that move from one field into the next change the key: every field has its length in front."""
    a = Namespace(b"ab", "c", b"d", b"e")
    b = Namespace(b"a", "bc", b"d", b"e")
    assert keys.namespace_id(a) != keys.namespace_id(b)
    assert keys.key_of(Namespace(b"f", "q", b"c", b"s"), b"xy") != keys.key_of(Namespace(b"f", "q", b"c", b"sx"), b"y")


@given(st.lists(st.one_of(st.binary(max_size=6), st.integers(0, 300)), max_size=6))
def test_text_never_spells_a_control_token(pieces: list[bytes | int]) -> None:
    """The rendered bytes tell exactly which of them are text and which control tokens."""
    rendered = b"".join(keys.escape_control(p) if isinstance(p, int) else keys.escape_plain(p) for p in pieces)
    back: list[bytes | int] = []
    at = 0
    while at < len(rendered):
        if rendered[at : at + 2] == b"\xff\x01":
            back.append(int.from_bytes(rendered[at + 2 : at + 6], "little"))
            at += 6
            continue
        byte = rendered[at : at + 1]
        at += 2 if byte == b"\xff" else 1
        last = back[-1] if back else None
        if isinstance(last, bytes):
            back[-1] = last + byte
        else:
            back.append(byte)
    want: list[bytes | int] = []
    for piece in pieces:
        last = want[-1] if want else None
        if isinstance(piece, bytes) and isinstance(last, bytes):
            want[-1] = last + piece
        elif piece != b"":
            want.append(piece)
    assert back == want


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_numbers_round_trip(numbers: list[int]) -> None:
    """Packed numbers are four bytes each, little-endian, and come back."""
    packed = keys.pack_u32(numbers)
    assert packed == b"".join(number.to_bytes(4, "little") for number in numbers)
    assert keys.unpack_u32(packed) == numbers
    assert keys.unpack_u32(keys.pack_u32(b"four")) == list(b"four")


def test_half_a_number_is_refused() -> None:
    """Bytes that are no whole numbers raise ValueError."""
    with pytest.raises(ValueError, match=r"multiple|length"):
        keys.unpack_u32(b"\0\0\0")


def test_quantisation_names_have_bytes() -> None:
    """Each named type maps to a byte and back; an unknown name is 255, and an unknown byte has no name."""
    assert len(keys.QUANT_BYTES) >= 30
    assert all(keys.quant_name(keys.quant_byte(name)) == name for name in keys.QUANT_BYTES)
    assert len(set(keys.QUANT_BYTES.values())) == len(keys.QUANT_BYTES)
    assert keys.quant_name(254) is None
    assert keys.quant_byte("future_q9_x") == 255
