"""Starting and stopping runtimes: a private one for a script, a test or a notebook, and the daemon of `barrelctl start`.

    with Runtime() as runtime:
        client = runtime.client()

A private runtime has a runtime directory of its own and, unless it is given one, a state directory of its own. It is tied to
this process: when this one ends, however it ends, the other stops, and what was temporary is removed.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Self, TypeVar

import msgspec
import zmq

from barrel_inference import codec, config, protocol
from barrel_inference.config import Settings
from barrel_inference.errors import DeadlineExceeded, InternalError, InvalidArgument, NoRuntime
from barrel_inference.log_file import open_log
from barrel_inference.protocol import ErrorBody, Header, Kind, Message, Ok, StopTree, TreeRows, TreeStatus
from barrel_inference.supervisor.notify import Started
from barrel_inference.tiers import policy
from barrel_inference.transport import MAX_SOCKET_PATH_BYTES, ipc_endpoint

if TYPE_CHECKING:
    from barrel_inference.client import Client

M = TypeVar("M", bound=Message)

# A stop takes at most the saves' own limit and, per wave of processes, the time to SIGKILL; this is beyond both.
_STOP_MARGIN_S = 40.0
# After the supervisor was killed the kernel ends its children at once; longer means that one is stuck in the kernel.
_ORPHANS_S = 10.0
# The longest name in a runtime directory that a short directory has to leave room for.
_NAME_BYTES = 60


class Runtime:
    """A private runtime; usable when the constructor returns.

    Args:
        config: path to a TOML file, or a mapping, laid over the packaged sys.toml.
        state_dir: kept at the end, and found again by the next runtime that is given it, `ram_file` rows included (their
            directory under /dev/shm is derived from it). Without one everything is temporary.
    """

    def __init__(
        self, config: str | Path | Mapping[str, Any] | None = None, *, state_dir: str | Path | None = None
    ) -> None:
        self._base = Path(tempfile.mkdtemp(prefix="barrel-", dir=_short_directory()))
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._clients: list[Client] = []
        self._alive_fd: int | None = None
        try:
            self.settings = _private_settings(config, self._base, state_dir)
            self._temporary = [self._base, *_temporary_roots(self.settings, self._base)]
            self._start()
        except BaseException:
            self.stop()
            raise

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return self.settings.runtime.endpoint

    @property
    def state_dir(self) -> Path:
        """Disk tier and logs."""
        return Path(self.settings.runtime.state_dir)

    @property
    def runtime_dir(self) -> Path:
        """Sockets."""
        return Path(self.settings.runtime.dir)

    def client(self, **options: Any) -> "Client":
        """A client of this runtime, closed with it at the latest. `options` as for `Client`."""
        # Here, because the client's module may use this one's neighbours, and a script may want no client at all.
        from barrel_inference.client import Client

        client = Client(self.endpoint, **options)
        self._clients.append(client)
        return client

    def processes(self) -> dict[str, int]:
        """The pid of every process by its id, "supervisor" included."""
        rows = ask_supervisor(self.runtime_dir, TreeStatus(), TreeRows)
        return {"supervisor": rows.supervisor_pid} | {row.id: row.pid for row in rows.children if row.pid is not None}

    def stop(self) -> None:
        """Stop everything, wait until every process is gone, and remove what was temporary. May be called again."""
        clients, self._clients = self._clients, []
        for client in clients:
            client.close()
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            _end(supervisor, self._stop_limit_s())
        alive_fd, self._alive_fd = self._alive_fd, None
        if alive_fd is not None:
            # End of file: nobody holds the other end, so every process is gone, whoever killed it.
            select.select([alive_fd], [], [], _ORPHANS_S)
            os.close(alive_fd)
        for path in getattr(self, "_temporary", [self._base]):
            shutil.rmtree(path, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        self._alive_fd, children_fd = os.pipe()
        arguments = ["--tied", "--alive-fd", str(children_fd)]
        for path in self._temporary:
            arguments += ["--remove-at-exit", str(path)]
        try:
            launched = _launch(self.settings, arguments, stdin=subprocess.PIPE, keep_fd=children_fd)
        finally:
            os.close(children_fd)
        self._supervisor = launched.process
        launched.wait(None)

    def _stop_limit_s(self) -> float:
        return self.settings.cache.evict_save_timeout_ms / 1000 + _STOP_MARGIN_S


# --- the daemon -----------------------------------------------------------------------------------------------------


def read_settings(given: str | Path | Mapping[str, Any] | None = None, *, sets: Iterable[str] = ()) -> Settings:
    """The settings of a configuration (path, mapping, or None for the packaged one) and `KEY=VALUE`s, checked whole.

    Raises:
        InvalidArgument: lists every problem.
    """
    if given is None or isinstance(given, Mapping):
        tables = dict(given or {})
    else:
        try:
            tables = config.parse(Path(given).read_text("utf-8"), name=str(given))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"configuration {str(given)!r} cannot be read: {error}") from None
    return config.settings_from(config.lay_over(config.apply_sets(tables, sets)), check_policy=policy.validate)


class Source(NamedTuple):
    """Where settings came from: what a reload reads again."""

    file: Path | None
    sets: tuple[str, ...]

    def arguments(self) -> list[str]:
        """For the supervisor's command line."""
        file = [] if self.file is None else [f"--source={self.file.absolute()}"]
        return ["--from-launcher", *file, *(f"--source-set={assignment}" for assignment in self.sets)]


def start_daemon(settings: Settings, *, timeout_s: float | None = None, source: Source | None = None) -> int:
    """Start a runtime in the background and wait until it is ready; the value is its supervisor's pid.

    Raises:
        BarrelError: why it did not start; its log is `<log_dir>/supervisor.log`.
    """
    arguments = ["--detach", *(source.arguments() if source else [])]
    launched = _launch(config.resolve(settings), arguments, stdin=subprocess.DEVNULL)
    try:
        return launched.wait(timeout_s)
    finally:
        launched.process.wait()  # it has detached, or it has failed


def run_foreground(settings: Settings, *, source: Source | None = None) -> None:
    """Become the supervisor of a runtime; does not return."""
    config_fd = _config_file(config.resolve(settings))
    os.set_inheritable(config_fd, True)
    os.execv(sys.executable, [*_command(config_fd), *(source.arguments() if source else [])])


def stop_daemon(runtime_dir: str | Path, *, timeout_s: float | None = None) -> None:
    """Stop the runtime of this directory and wait until its supervisor has gone, and with it everything.

    Raises:
        NoRuntime: there is none.
        DeadlineExceeded: it is still stopping after `timeout_s`.
    """
    directory = Path(runtime_dir)
    pid = ask_supervisor(directory, TreeStatus(), TreeRows).supervisor_pid
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(NoRuntime):  # it was faster than our question
            ask_supervisor(directory, StopTree(), Ok, timeout_s=timeout_s)
        if not select.select([descriptor], [], [], timeout_s)[0]:
            raise DeadlineExceeded(f"the runtime in {str(directory)!r} is still stopping after {timeout_s} s")
    finally:
        os.close(descriptor)


def ask_supervisor(runtime_dir: Path, message: Message, reply: type[M], *, timeout_s: float | None = 10.0) -> M:
    """Ask a supervisor directly, without the router and so without a client.

    Raises:
        NoRuntime: nobody listens there, or it stopped listening before it answered.
        DeadlineExceeded: no answer in time.
    """
    path = runtime_dir / "supervisor"
    _check_listening(path)
    header = Header(protocol.VERSION, Kind.CALL, protocol.VERB_OF[type(message)], "1")
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(ipc_endpoint(path))
        dealer.send_multipart([b"", codec.encode(header), codec.encode(message)])
        while not dealer.poll(200):
            if until_s is not None and time.monotonic() > until_s:
                raise DeadlineExceeded(f"the supervisor in {str(runtime_dir)!r} did not answer within {timeout_s} s")
            _check_listening(path)
        _, raw_header, body = dealer.recv_multipart()
    if codec.decode_header(raw_header).kind is Kind.ERROR:
        raise codec.error_from(codec.decode(body, ErrorBody))
    return codec.decode(body, reply)


def _check_listening(path: Path) -> None:
    """ZeroMQ waits for a peer to come; a plain connect says at once that there is none."""
    ipc_endpoint(path)  # a path that is too long has an error of its own
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            raise NoRuntime(f"no runtime in {str(path.parent)!r}", hint="start one with `barrelctl start`") from None


# --- launching --------------------------------------------------------------------------------------------------------


class _Launched:
    """A supervisor that has been started and has not yet said whether it is ready."""

    def __init__(self, process: "subprocess.Popen[bytes]", ready: BinaryIO, log_path: Path) -> None:
        self.process = process
        self._ready = ready
        self._log_path = log_path

    def wait(self, timeout_s: float | None) -> int:
        """The supervisor's pid once everything is ready, or the reason why it is not."""
        with self._ready as ready:
            if not select.select([ready], [], [], timeout_s)[0]:
                raise DeadlineExceeded(f"the runtime is not ready after {timeout_s} s", hint=f"see {self._log_path}")
            line = ready.read()
        if not line:
            status = self.process.wait()
            raise InternalError(f"the supervisor ended with status {status}", hint=f"see {self._log_path}")
        started = msgspec.json.decode(line, type=Started)
        if started.error is not None:
            raise codec.error_from(started.error)
        return started.pid


def _launch(settings: Settings, arguments: list[str], *, stdin: int, keep_fd: int | None = None) -> _Launched:
    log_path = Path(settings.runtime.log_dir) / "supervisor.log"
    try:
        log_fd = open_log(log_path)
    except OSError as error:
        raise InvalidArgument(f"runtime.log_dir cannot be used: {error}") from None
    ready_fd, child_ready_fd = os.pipe()
    config_fd = _config_file(settings)
    keep = [config_fd, child_ready_fd, *([] if keep_fd is None else [keep_fd])]
    try:
        process = subprocess.Popen(
            [*_command(config_fd), "--ready-fd", str(child_ready_fd), *arguments],
            stdin=stdin, stdout=log_fd, stderr=log_fd, pass_fds=keep, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(log_fd)
        os.close(config_fd)
        os.close(child_ready_fd)
    return _Launched(process, os.fdopen(ready_fd, "rb"), log_path)


def _command(config_fd: int) -> list[str]:
    return [
        sys.executable, "-P", "-m", "barrel_inference.supervisor.root", "--config", f"/proc/self/fd/{config_fd}",
    ]  # fmt: skip


def _config_file(settings: Settings) -> int:
    """The settings as a file without a name, so that none is left behind."""
    descriptor = os.memfd_create("sys.toml")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(config.to_toml(settings).encode())
    return descriptor


def _end(supervisor: "subprocess.Popen[bytes]", limit_s: float) -> None:
    """Let a supervisor stop its children; one that does not is killed, and they with it."""
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        supervisor.send_signal(signal.SIGTERM)
    try:
        supervisor.wait(limit_s)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()


def _private_settings(
    given: str | Path | Mapping[str, Any] | None, base: Path, state_dir: str | Path | None
) -> Settings:
    settings = read_settings(given)
    if settings.runtime.endpoint or settings.runtime.dir:
        settings = msgspec.structs.replace(
            settings, runtime=msgspec.structs.replace(settings.runtime, endpoint="", dir="")
        )
    return config.resolve(
        settings, runtime_dir=base / "run", state_dir=state_dir or settings.runtime.state_dir or base / "state"
    )


def _temporary_roots(settings: Settings, base: Path) -> Iterator[Path]:
    """The directories outside `base` that belong to a runtime without a state directory of its own."""
    state_dir = Path(settings.runtime.state_dir)
    if state_dir == base / "state":
        yield config.ram_file_root(state_dir)


def _short_directory() -> Path:
    """A directory for sockets: the temporary one, unless the kernel's limit on their paths forbids it."""
    usual = Path(tempfile.gettempdir())
    room_bytes = MAX_SOCKET_PATH_BYTES - len("/barrel-xxxxxxxx/run/") - _NAME_BYTES
    return usual if len(os.fsencode(usual)) <= room_bytes else Path("/tmp")
