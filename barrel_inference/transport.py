"""One ZeroMQ socket on an asyncio loop: frames in by a callback, frames out without blocking.

Every server process binds one ROUTER; everyone else connects a DEALER with a random identity. Sends never block and never
queue for a peer that is gone: `ROUTER_MANDATORY` and `IMMEDIATE` turn both into an error at once. Without them ZeroMQ drops
messages silently (18,000 of 20,000 to a slow reader).
"""

import asyncio
import grp
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, cast

import zmq

from barrel_inference import protocol
from barrel_inference.config import default_runtime_dir as default_runtime_dir
from barrel_inference.errors import InvalidArgument

# sun_path holds 108 bytes with its terminating zero (unix(7)).
MAX_SOCKET_PATH_BYTES = 107

# Messages that may wait in a socket. Streams are bounded by credit, so this is only reached by a peer that stopped reading.
HIGH_WATER_MESSAGES = 2000

Frames = list[bytes]

# News of a connection; refused: by a runtime that does not know this client's key.
LinkNews = Literal["stands", "broken", "refused"]


class CurveKeys(NamedTuple):
    """What a client needs to get in over TCP, in Z85 as ZeroMQ takes it."""

    public: bytes
    secret: bytes
    server: bytes  # the runtime's public key


class Unreachable(Exception):
    """The peer is gone, or reads nothing: the message was not sent."""


class Socket:
    """A ZeroMQ socket that reads itself whenever the loop runs.

    `on_frames` is called with each multipart message; it must not raise. Not thread-safe: use it from the loop's thread.
    """

    def __init__(
        self, zsocket: "zmq.Socket[bytes]", on_frames: Callable[[Frames], None], monitor: "Socket | None" = None
    ) -> None:
        self._zsocket = zsocket
        self._monitor = monitor
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = cast(int, zsocket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._drain_soon = False
        self.tells_users = False
        self.closed = False
        self._schedule()  # messages may have arrived before the reader was added

    def send(self, frames: Frames) -> None:
        """Send now, or raise `Unreachable`."""
        if self.closed:
            raise Unreachable("socket is closed")
        try:
            self._zsocket.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise Unreachable(zmq.strerror(error.errno)) from None
            raise
        finally:
            # The descriptor is edge-triggered: a send may swallow the edge of a message that came in meanwhile.
            if not self.closed and self._is_readable():
                self._schedule()

    def bind_curve(self, address: str, *, public: bytes, secret: bytes, domain: bytes) -> None:
        """Listen there too, for peers whose CURVE key is known. From now on each message ends with one more frame: the name
        of its sender's key, empty for those who came another way."""
        self._zsocket.setsockopt(zmq.CURVE_SERVER, 1)
        self._zsocket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self._zsocket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._zsocket.setsockopt(zmq.ZAP_DOMAIN, domain)
        try:
            self._zsocket.bind(address)
        except zmq.ZMQError as error:
            raise InvalidArgument(f"cannot listen at {address}: {error.strerror}") from None
        self.tell_users()

    def tell_users(self) -> None:
        """From now on each message ends with one more frame: who sent it (see `user_of`)."""
        self.tells_users = True

    def close(self, linger_ms: int = 0) -> None:
        """Close; what was sent and not yet delivered is given up after `linger_ms`."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._fd)
            if self._monitor:
                self._zsocket.disable_monitor()
                self._monitor.close()
            self._zsocket.close(linger_ms)

    def _is_readable(self) -> bool:
        return bool(cast(int, self._zsocket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _receive(self) -> Frames:
        if not self.tells_users:
            return self._zsocket.recv_multipart(zmq.NOBLOCK)
        found = self._zsocket.recv_multipart(zmq.NOBLOCK, copy=False)
        address = str(found[-1].get("Peer-Address"))
        # Asked of TCP peers only: what a peer of the Unix socket calls itself could be anything.
        user = local_user(address, os.getuid())
        if user is None:
            user = str(found[-1].get("User-Id"))
        return [*(frame.bytes for frame in found), user.encode()]

    def _schedule(self) -> None:
        if not self._drain_soon:
            self._drain_soon = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_soon = False
        # A bounded turn, so that a flood on one socket leaves the others and the timers their share.
        for _ in range(200):
            if self.closed or not self._is_readable():
                return
            try:
                frames = self._receive()
            except zmq.Again:
                return
            self._on_frames(frames)
        self._schedule()


def local_user(peer_address: str, own_uid: int) -> str | None:
    """Who is at the other end of a Unix socket: "" for this user and root, `uid:N` for another; None: it is no Unix socket.

    libzmq appends what the kernel says of the peer (SO_PEERCRED): `localhost:UID:GID:PID`. Addresses of TCP peers are numeric.
    """
    name, *numbers = peer_address.split(":")
    if name != "localhost" or len(numbers) != 3:
        return None
    return "" if int(numbers[0]) in (0, own_uid) else f"uid:{numbers[0]}"


def open_to_group(socket_path: Path, group: str) -> None:
    """Let the members of a group connect to this one socket of a private directory, and see nothing else of it."""
    try:
        gid = grp.getgrnam(group).gr_gid
        for path, mode in ((socket_path.parent, 0o710), (socket_path, 0o660)):
            if path.stat().st_gid != gid:
                os.chown(path, -1, gid)
            path.chmod(mode)
    except (KeyError, OSError) as error:
        raise InvalidArgument(
            f"runtime.socket_group = {group!r}: {error}", hint="name a group that the runtime's user is in"
        ) from None


def bind_router(context: "zmq.Context[zmq.Socket[bytes]]", path: Path, on_frames: Callable[[Frames], None]) -> Socket:
    """The server socket of a process at `path`."""
    zsocket = context.socket(zmq.ROUTER)
    zsocket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    _configure(zsocket)
    zsocket.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_MESSAGE_BYTES)
    zsocket.bind(ipc_endpoint(path))
    return Socket(zsocket, on_frames)


def connect_dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, on_frames: Callable[[Frames], None],
    on_link: Callable[[LinkNews], None] | None = None, curve: CurveKeys | None = None,
) -> Socket:  # fmt: skip
    """A connection to a server process, under a random identity that ZeroMQ chooses.

    `on_link` is called once it stands, and whenever it could not be made or broke. Children need it not: the supervisor
    tells them.
    """
    zsocket = context.socket(zmq.DEALER)
    _configure(zsocket)
    zsocket.setsockopt(zmq.RECONNECT_IVL, 20)
    zsocket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    if curve:
        zsocket.setsockopt(zmq.CURVE_PUBLICKEY, curve.public)
        zsocket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)
        zsocket.setsockopt(zmq.CURVE_SERVERKEY, curve.server)
    monitor = _watch(zsocket, on_link) if on_link else None
    try:
        zsocket.connect(endpoint)
    except zmq.ZMQError as error:
        zsocket.close(0)
        raise InvalidArgument(f"endpoint {endpoint!r} is no endpoint: {error.strerror}") from None
    return Socket(zsocket, on_frames, monitor)


_LINK_EVENTS: dict[int, LinkNews] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "stands",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused",
    zmq.EVENT_DISCONNECTED: "broken",
    zmq.EVENT_CLOSED: "broken",
    zmq.EVENT_CONNECT_RETRIED: "broken",
}


def _watch(zsocket: "zmq.Socket[bytes]", on_link: Callable[[LinkNews], None]) -> Socket:
    def on_event(frames: Frames) -> None:
        event = int.from_bytes(frames[0][:2], sys.byteorder)  # zmq_socket_monitor(3): u16 event, u32 value
        if (news := _LINK_EVENTS.get(event)) is not None:
            on_link(news)

    return Socket(zsocket.get_monitor_socket(sum(_LINK_EVENTS)), on_event)


def _configure(zsocket: "zmq.Socket[bytes]") -> None:
    zsocket.setsockopt(zmq.LINGER, 0)
    zsocket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
    zsocket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)


def ipc_endpoint(path: Path) -> str:
    """The endpoint of a Unix socket, or `InvalidArgument` if its path is too long for the kernel."""
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise InvalidArgument(
            f"socket path {str(path)!r} has {length} bytes, the kernel allows {MAX_SOCKET_PATH_BYTES}",
            hint="choose a shorter runtime.dir",
        )
    return f"ipc://{path}"


def make_private_dir(path: Path) -> None:
    """Create `path` with mode 0700, or check that an existing one is this user's and closed to others."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise InvalidArgument(f"directory {str(path)!r} is a link", hint="name the directory that it leads to")
    if found.st_uid != os.getuid():
        raise InvalidArgument(
            f"directory {str(path)!r} belongs to uid {found.st_uid}, not to {os.getuid()}",
            hint="remove it, or choose another runtime.dir or runtime.state_dir",
        )
    if found.st_mode & 0o077:
        path.chmod(0o700)
