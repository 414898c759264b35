"""Messages that nobody should send: valid ones with wild values, and mutations of them, from a seeded generator."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import inspect

from barrel_inference import codec, protocol
from barrel_inference.protocol import Header, Kind, Route

# These are orders that the supervisor is there to obey: a valid one is no attack.
_OBEYED = {"stop_tree", "start_child", "stop_child", "restart_child", "unload", "set_adapters"}

_WORDS = (
    "", "a", "router", "index", "tier:ram", "tier:disk", "model:m", "m", "ram", "complete", "stub", "finish", "token",
    "../../../etc/passwd", "00/" + "0" * 64, "\x00", "\ud7ff", "é" * 50, "x" * 5000, "{}", "root ::= root", "-1", "inf",
)  # fmt: skip
_NUMBERS = (0, 1, 2, 31, 255, 256, 4096, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1)
_ODD: tuple[Any, ...] = (-1, -(2**63), 2**64 - 1, 1.5, float("nan"), float("inf"), None, True, [], {}, "", b"")


class Fuzzer:
    """An endless source of frames."""

    def __init__(self, seed: int, ids: list[str]) -> None:
        self.rng = random.Random(seed)
        self.ids = ids
        self._makers: dict[type, Callable[[inspect.Type], Any]] = {
            inspect.IntType: self._integer,
            inspect.FloatType: lambda _t: self.rng.choice((0.0, 0.5, 1.0, 1e300, -1e300, 5e-324)),
            inspect.StrType: self._text,
            inspect.BytesType: self._bytes,
            inspect.BoolType: lambda _t: self.rng.random() < 0.5,
            inspect.NoneType: lambda _t: None,
        }
        self._fields = {
            cls: inspect.type_info(cls) for cls in {*protocol.CASTS.values(), *(c for c, _ in protocol.CALLS.values())}
        }
        self._verbs = [verb for verb in (*protocol.CALLS, *protocol.CASTS) if verb not in _OBEYED]

    def client_frames(self) -> list[bytes]:
        """What a client might send to the router."""
        target = self.rng.choice([*self.ids, "", "model:nobody", "nobody"]).encode()
        return self._frames(self.rng.choice((target, target, target, self.rng.randbytes(5))))

    def peer_frames(self) -> list[bytes]:
        """What somebody might send to a process's own socket."""
        route = b"" if self.rng.random() < 0.5 else codec.encode(Route(client=self.rng.randbytes(5)))
        return self._frames(self.rng.choice((route, route, route, self.rng.randbytes(9))))

    def _frames(self, first: bytes) -> list[bytes]:
        verb = self.rng.choice(self._verbs)
        is_call = verb in protocol.CALLS
        cls = protocol.CALLS[verb][0] if is_call else protocol.CASTS[verb]
        header = Header(
            protocol.VERSION, Kind.CALL if is_call else Kind.CAST, verb, f"f{self.rng.randrange(10**6)}",
            deadline_ms=self.rng.choice((0, 1, 100, 2**62)), credit=self.rng.choice((0, 1, 32, 2**40)),
        )  # fmt: skip
        raw_header = codec.encode(header)
        body = self._body(cls)
        match self.rng.randrange(10):
            case 0:
                raw_header = self._broken(raw_header)
            case 1:
                body = self._broken(body)
            case 2:
                body = self.rng.randbytes(self.rng.randrange(64))
            case 3:
                body = self._nested()
            case 4:
                return [first, raw_header, body, b"more"][: self.rng.randrange(5)] or [b""]
        return [first, raw_header, body]

    def _body(self, cls: type) -> bytes:
        value = self._value(self._fields[cls], 0)
        if isinstance(value, dict) and value and self.rng.random() < 0.3:
            value[self.rng.choice(list(value))] = self.rng.choice(_ODD)
        if isinstance(value, dict) and self.rng.random() < 0.05:
            value["no_such_field"] = 1
        return msgspec.msgpack.encode(value)

    def _value(self, kind: inspect.Type, depth: int) -> Any:
        if make := self._makers.get(type(kind)):
            return make(kind)
        match kind:
            case inspect.StructType(fields=fields, array_like=array_like):
                chosen = [f for f in fields if f.required or array_like or self.rng.random() < 0.6]
                values = {f.encode_name: self._value(f.type, depth + 1) for f in chosen}
                return list(values.values()) if array_like else values
            case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
                return [self._value(item, depth + 1) for _ in range(self.rng.choice((0, 1, 3)) if depth < 6 else 0)]
            case inspect.TupleType(item_types=items):
                return [self._value(item, depth + 1) for item in items]
            case inspect.DictType():
                return {self.rng.choice(_WORDS): self._any(depth) for _ in range(self.rng.choice((0, 1, 3)))}
            case inspect.UnionType(types=types):
                return self._value(self.rng.choice(types), depth)
            case inspect.EnumType(cls=cls):
                return self.rng.choice(list(cls)).value
            case _:
                return self._any(depth)

    def _any(self, depth: int) -> Any:
        if depth < 4 and self.rng.random() < 0.3:
            return [self._any(depth + 1) for _ in range(2)]
        return self.rng.choice(
            (*_ODD, self.rng.choice(_WORDS), self.rng.choice(self.ids), self.rng.choice(_NUMBERS), [1, 2])
        )

    def _integer(self, kind: inspect.Type) -> int:
        assert isinstance(kind, inspect.IntType)
        low = kind.ge if kind.ge is not None else -(2**63)
        return max(self.rng.choice(_NUMBERS), low)

    def _text(self, kind: inspect.Type) -> str:
        assert isinstance(kind, inspect.StrType)
        text = self.rng.choice((self.rng.choice(_WORDS), self.rng.choice(self.ids)))
        return text[: kind.max_length] if kind.max_length else text

    def _bytes(self, kind: inspect.Type) -> bytes:
        assert isinstance(kind, inspect.BytesType)
        return self.rng.randbytes(kind.min_length or self.rng.choice((0, 1, 4, 8, 32, 33, 400)))

    def _broken(self, raw: bytes) -> bytes:
        changed = bytearray(raw)
        for _ in range(self.rng.randrange(1, 4)):
            if changed:
                changed[self.rng.randrange(len(changed))] = self.rng.randrange(256)
        return bytes(changed[: self.rng.randrange(len(changed) + 1)] if self.rng.random() < 0.3 else changed)

    def _nested(self) -> bytes:
        one = self.rng.choice((b"\x91", b"\x81\xa1a", b"\xdd\xff\xff\xff\xff"))
        return one * self.rng.choice((3, 1000, 20_000))
