"""Cache keys: SHA-256 of a namespace and the rendered bytes of a prefix. Pure.

    key = SHA-256(len ‖ fingerprint ‖ len ‖ quant ‖ len ‖ ctx_params_hash ‖ len ‖ salt ‖ rendered bytes)

Lengths are u32 little-endian. Rendered bytes are the pieces of the tokens one after another; in them a plain byte 0xFF is
written 0xFF 0x00 and a control token 0xFF 0x01 and its id (u32 little-endian), so no text can spell a control token.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from barrel_inference.protocol import Namespace

if TYPE_CHECKING:
    from hashlib import _Hash

_LENGTH = struct.Struct("<I")

# Quantisations by name, as a byte: the number of llama.cpp's file type. Append only.
QUANT_BYTES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k_s": 11, "q3_k_m": 12,
    "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18, "iq2_xxs": 19, "iq2_xs": 20,
    "q2_k_s": 21, "iq3_xs": 22, "iq3_xxs": 23, "iq1_s": 24, "iq4_nl": 25, "iq3_s": 26, "iq3_m": 27, "iq2_s": 28,
    "iq2_m": 29, "iq4_xs": 30, "iq1_m": 31, "bf16": 32, "tq1_0": 36, "tq2_0": 37,
}  # fmt: skip
UNKNOWN_QUANT_BYTE = 255
_QUANT_NAMES = {number: name for name, number in QUANT_BYTES.items()}


def start(namespace: Namespace) -> "_Hash":
    """A SHA-256 that has taken the namespace's fields; `copy` and `update` it with rendered bytes."""
    digest = hashlib.sha256()
    for part in (namespace.fingerprint, namespace.quant.encode(), namespace.ctx_params_hash, namespace.salt):
        digest.update(_LENGTH.pack(len(part)))
        digest.update(part)
    return digest


def key_of(namespace: Namespace, text: bytes) -> bytes:
    """The key of a prefix with these rendered bytes, 32 bytes."""
    digest = start(namespace)
    digest.update(text)
    return digest.digest()


def namespace_id(namespace: Namespace) -> bytes:
    """32 bytes that name the namespace; also the key of its empty prefix."""
    return start(namespace).digest()


def escape_plain(piece: bytes) -> bytes:
    """A token's text as it is hashed."""
    return piece.replace(b"\xff", b"\xff\x00") if b"\xff" in piece else piece


def escape_control(token_id: int) -> bytes:
    """A control token as it is hashed."""
    return b"\xff\x01" + _LENGTH.pack(token_id)


def quant_byte(name: str) -> int:
    """The byte of a quantisation; 255 for a name that is not known."""
    return QUANT_BYTES.get(name, UNKNOWN_QUANT_BYTE)


def quant_name(number: int) -> str | None:
    """The quantisation of a byte, None if there is none."""
    return _QUANT_NAMES.get(number)


def pack_u32(values: Iterable[int]) -> bytes:
    """Numbers below 2**32 as u32 little-endian."""
    packed = array("I")
    packed.extend(values)  # given to the constructor, bytes would be taken for packed numbers
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_u32(data: bytes) -> list[int]:
    """The numbers of `pack_u32`.

    Raises:
        ValueError: not a multiple of four bytes.
    """
    unpacked = array("I")
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()
