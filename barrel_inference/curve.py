"""CURVE: who may come in over TCP, and as whom.

The server's directory (`runtime.curve`) holds `server.key_secret` and one `clients/NAME.key` per client; NAME is the tenant,
and bounds what its requests share. A client's directory (`$BARREL_CURVE`) holds `server.key` and `client.key_secret`. All
are ZeroMQ certificates, as `zmq.auth.create_certificates` writes them.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from barrel_inference.errors import InvalidArgument
from barrel_inference.transport import CurveKeys, Frames, Socket

DOMAIN = b"barrel"  # ZeroMQ asks about every connection that has one

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by the protocol: https://rfc.zeromq.org/spec/27/


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Keys in Z85, as ZeroMQ takes them."""

    public: bytes
    secret: bytes


def server_keys(directory: Path) -> KeyPair:
    """The runtime's own keys."""
    return _pair(directory / "server.key_secret")


def tenants(directory: Path) -> dict[bytes, str]:
    """The name of each client's public key."""
    return {_public(path): path.stem for path in sorted((directory / "clients").glob("*.key"))}


def client_keys(endpoint: str) -> CurveKeys | None:
    """The keys for this endpoint: none for a Unix socket, those in `$BARREL_CURVE` for TCP."""
    if not endpoint.startswith("tcp://"):
        return None
    found = os.environ.get("BARREL_CURVE")
    if not found:
        raise InvalidArgument(
            f"endpoint {endpoint} needs keys, and BARREL_CURVE is not set",
            hint="set it to a directory with server.key and client.key_secret",
        )
    directory = Path(found)
    own = _pair(directory / "client.key_secret")
    return CurveKeys(own.public, own.secret, _public(directory / "server.key"))


def _pair(path: Path) -> KeyPair:
    public, secret = _certificate(path)
    if secret is None:
        raise InvalidArgument(f"{str(path)!r} holds no secret key")
    return KeyPair(public, secret)


def _public(path: Path) -> bytes:
    return _certificate(path)[0]


def _certificate(path: Path) -> tuple[bytes, bytes | None]:
    # Here, because only who uses TCP needs it.
    import zmq.auth

    try:
        path.stat()  # what may not be looked at, zmq.auth would call invalid
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as bad:
        why = bad.strerror if isinstance(bad, OSError) and bad.strerror else bad
        raise InvalidArgument(f"key file {str(path)!r} cannot be read: {why}", hint="see `barrelctl keys`") from None


class Gatekeeper:
    """Answers ZeroMQ's question, once per TCP connection, whether a key may come in and what its owner is called."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", known: dict[bytes, str]) -> None:
        self._known = known
        zsocket = context.socket(zmq.REP)
        zsocket.bind(_ZAP_ENDPOINT)
        self._socket = Socket(zsocket, self._on_question)

    def admit(self, known: dict[bytes, str]) -> None:
        """Let these in from now on; connections that stand stay."""
        self._known = known

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close()

    def _on_question(self, frames: Frames) -> None:
        version, request_id, _domain, _address, _identity, mechanism, *credentials = frames
        name = None
        if mechanism == b"CURVE" and credentials:
            name = self._known.get(z85.encode(credentials[0]))
        status, text = (b"400", b"unknown key") if name is None else (b"200", b"OK")
        self._socket.send([version, request_id, status, text, (name or "").encode(), b""])
