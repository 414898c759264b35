"""Bytes to messages and back, trusting nothing. Pure.

Size first, then the header's shape, then the body's: msgspec checks every field's type and range while it parses, and
refuses unknown fields, so what comes out is a value of our own types or a `ProtocolError` that names the field.
"""

from typing import TypeVar

import msgspec

from barrel_inference import protocol
from barrel_inference.errors import BarrelError, InvalidArgument, ProtocolError, from_wire
from barrel_inference.protocol import ErrorBody, Header, Kind, Message

M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_decoders: dict[type[Message], "msgspec.msgpack.Decoder[Message]"] = {}

# Of header and route: far above what they need, far below what would hurt.
_MAX_SMALL_BYTES = 4096


def encode(value: Message | Header) -> bytes:
    """Serialize, or raise `InvalidArgument`: what callers give may hold lone surrogates, endless integers, any object."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError as bad:
        raise InvalidArgument(f"{bad.object!r} is no valid text: it has a lone surrogate", hint="use UTF-8") from None
    except (OverflowError, TypeError, RecursionError) as bad:
        raise InvalidArgument(f"{type(value).__name__} cannot be sent: {bad}") from None


def decode_header(frame: bytes) -> Header:
    """Parse the header frame, or raise `ProtocolError`."""
    if len(frame) > _MAX_SMALL_BYTES:
        raise ProtocolError(f"header of {len(frame)} bytes, limit {_MAX_SMALL_BYTES}")
    try:
        header = _header_decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as bad:
        raise ProtocolError(f"header does not parse: {bad}") from bad
    if header.version != protocol.VERSION:
        raise ProtocolError(
            f"protocol version {header.version}, this runtime speaks {protocol.VERSION}",
            hint="use the client that belongs to the runtime",
        )
    return header


def request_id_of(frame: bytes) -> str | None:
    """The request id of a header that is otherwise not accepted, so that its sender can be told; None if there is none."""
    if len(frame) > _MAX_SMALL_BYTES:
        return None
    try:
        fields = msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    request_id = fields[3] if isinstance(fields, list) and len(fields) > 3 else None
    return request_id if isinstance(request_id, str) and 0 < len(request_id) <= 100 else None


def decode(body: bytes, cls: type[M]) -> M:
    """Parse a body as `cls`, or raise `ProtocolError` naming what was wrong with it."""
    if len(body) > protocol.MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(body)} bytes, limit {protocol.MAX_MESSAGE_BYTES}")
    decoder = _decoders.get(cls)
    if decoder is None:
        decoder = _decoders[cls] = msgspec.msgpack.Decoder(cls)
    try:
        return decoder.decode(body)  # type: ignore[return-value]  # the decoder was made for `cls`
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as bad:
        raise ProtocolError(f"{cls.__name__}: {bad}") from bad


def decode_request(header: Header, body: bytes) -> Message:
    """The body of a call or cast, by its verb."""
    if header.kind is Kind.CALL and header.verb in protocol.CALLS:
        return decode(body, protocol.CALLS[header.verb][0])
    if header.kind is Kind.CAST and header.verb in protocol.CASTS:
        return decode(body, protocol.CASTS[header.verb])
    raise ProtocolError(f"unknown {header.kind} {header.verb!r}")


def error_body(error: BarrelError) -> ErrorBody:
    """An exception as it travels; file names and templates may have put what is no text into its words."""
    return ErrorBody(
        code=error.code, message=_text(error.message), hint=error.hint and _text(error.hint), retryable=error.retryable,
        details=error.details,
    )  # fmt: skip


def _text(words: str) -> str:
    return words.encode("utf-8", "backslashreplace").decode()


def error_from(body: ErrorBody) -> BarrelError:
    """The exception a peer reported."""
    return from_wire(body.code, body.message, hint=body.hint, retryable=body.retryable, details=body.details)
