"""What the head of a GGUF file says: its metadata, and where its first tensor ends. Needs no llama.cpp.

Layout (little-endian):

    0    magic "GGUF"
    4    u32 version (2 or 3)
    8    u64 number of tensors
    16   u64 number of metadata pairs
    24   pairs: string key, u32 type, value;  a string is u64 length + bytes, an array u32 type + u64 count + items
    ..   tensors: string name, u32 dimensions, u64 each, u32 type, u64 offset from the start of the data
    ..   padding to `general.alignment`, then the tensors' data
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Scalar: TypeAlias = int | float | bool | str

_FIRST_READ_BYTES = 1 << 20
_MAGIC = 0x46554747
_DEFAULT_ALIGNMENT = 32
_MAX_ITEMS = 1 << 24  # more keys, tensors or array items than any model has: the file is damaged
_MAX_STRING_BYTES = 1 << 28
_MAX_DEPTH = 8  # of arrays within arrays
_KEPT_ITEMS = 4096  # arrays of numbers up to this length are kept: one number a layer, not one a token

_STRING, _ARRAY = 8, 9
# Metadata value types and how `struct` calls them.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_SIZES = {kind: struct.calcsize(f"<{code}") for kind, code in _FORMATS.items()}


class _EndOfData(Exception):
    """More bytes of the file are needed."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The head of one file."""

    values: dict[str, Scalar]
    arrays: dict[str, tuple[Scalar, ...]]  # short arrays of numbers only
    lengths: dict[str, int]  # of every array
    data_start: int  # where the tensors' data begin
    first_tensor_end: int  # where the first tensor's end
    size_bytes: int  # of the file

    def number(self, key: str, default: int = 0) -> int:
        """A whole number; the largest one where the file has an array of them."""
        if key in self.arrays:
            return max((int(value) for value in self.arrays[key]), default=default)
        value = self.values.get(key, default)
        return default if isinstance(value, str) else int(value)

    def per_layer(self, key: str, layers: int, default: int = 0) -> list[int]:
        """A number for each layer, whether the file has one for all or an array."""
        if key in self.arrays:
            given = [int(value) for value in self.arrays[key]][:layers]
            return given + [default] * (layers - len(given))
        return [self.number(key, default)] * layers

    def text(self, key: str) -> str:
        """A text; empty when there is none."""
        value = self.values.get(key, "")
        return value if isinstance(value, str) else ""


def read_header(path: Path) -> GgufHeader:
    """The head of a GGUF file.

    Raises:
        EOFError: the file ends in it.
        ValueError: it makes no sense.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    wanted = _FIRST_READ_BYTES
    with path.open("rb") as file:
        while True:
            file.seek(0)
            data = file.read(wanted)
            try:
                return _Reader(data).header(size)
            except _EndOfData:
                if len(data) < wanted:
                    raise EOFError("the file ends in its metadata") from None
                wanted *= 4


class _Reader:
    """A place in bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def header(self, size: int) -> GgufHeader:
        magic, version, n_tensors, n_keys = (self._number(code) for code in "IIQQ")
        if magic != _MAGIC:
            raise ValueError("it is no GGUF file")
        if version not in (2, 3) or n_tensors > _MAX_ITEMS or n_keys > _MAX_ITEMS:
            raise ValueError(f"GGUF version {version} with {n_tensors} tensors and {n_keys} keys is not supported")
        values: dict[str, Scalar] = {}
        arrays: dict[str, tuple[Scalar, ...]] = {}
        lengths: dict[str, int] = {}
        for _ in range(int(n_keys)):
            key = self._string().decode("utf-8", "replace")
            kind = int(self._number("I"))
            if kind == _ARRAY:
                lengths[key], items = self._array(0)
                if items is not None:
                    arrays[key] = items
            else:
                values[key] = self._scalar(kind)
        alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
        step = max(1, alignment) if isinstance(alignment, int) else _DEFAULT_ALIGNMENT
        offsets = sorted(self._tensor_offset() for _ in range(int(n_tensors)))
        start = -(-self._at // step) * step
        return GgufHeader(values, arrays, lengths, start, start + offsets[1] if len(offsets) > 1 else size, size)

    def _tensor_offset(self) -> int:
        self._skip(self._length())
        self._skip(8 * int(self._number("I")) + 4)  # dimensions and type
        return int(self._number("Q"))

    def _scalar(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self._string().decode("utf-8", "replace")
        if kind not in _FORMATS:
            raise ValueError(f"a value of unknown type {kind}")
        return self._number(_FORMATS[kind])

    def _array(self, depth: int) -> tuple[int, tuple[Scalar, ...] | None]:
        """The length, and the items if they are few numbers."""
        kind, count = int(self._number("I")), int(self._number("Q"))
        if count > _MAX_ITEMS or depth > _MAX_DEPTH:
            raise ValueError(f"an array of {count} items, {depth} deep")
        if kind in _FORMATS:
            if count <= _KEPT_ITEMS:
                return count, tuple(self._number(_FORMATS[kind]) for _ in range(count))
            self._skip(_SIZES[kind] * count)
        elif kind == _STRING:
            self._skip_strings(count)
        elif kind == _ARRAY:
            for _ in range(count):
                self._array(depth + 1)
        else:
            raise ValueError(f"a value of unknown type {kind}")
        return count, None

    def _skip_strings(self, count: int) -> None:
        """A vocabulary has some hundred thousand of them."""
        data, at = self._data, self._at
        try:
            for _ in range(count):
                (length,) = _LENGTH.unpack_from(data, at)
                if length > _MAX_STRING_BYTES:
                    raise ValueError(f"a text of {length} bytes")
                at += _LENGTH.size + length
        except struct.error:
            raise _EndOfData from None
        self._skip(at - self._at)

    def _number(self, code: str) -> int | float | bool:
        try:
            (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        except struct.error:
            raise _EndOfData from None
        self._at += struct.calcsize(f"<{code}")
        return value  # type: ignore[no-any-return]  # what struct unpacks has no type

    def _length(self) -> int:
        length = int(self._number("Q"))
        if length > _MAX_STRING_BYTES:
            raise ValueError(f"a text of {length} bytes")
        return length

    def _string(self) -> bytes:
        start = self._at + 8
        self._skip(self._length())
        return self._data[start : self._at]

    def _skip(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise _EndOfData
