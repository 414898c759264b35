"""A runtime as a service: what the manager is told, and a configuration that changes while it runs."""

import contextlib
import grp
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from barrel_inference import Client, Runtime
from barrel_inference.errors import BadModel, InvalidArgument, NoRuntime
from barrel_inference.protocol import Reload, Reloaded
from barrel_inference.runtime import ask_supervisor, read_settings, start_daemon, stop_daemon
from tests.process.killing import wait_for

DEADLINE_S = 60

CONFIG = """
[runtime]
dir = "{base}/run"
state_dir = "{base}/state"
[tiers.ram]
quota_bytes = "{ram}"
[tiers.ram_file]
enabled = false
[writer]
processes = 1
{more}
"""


class Service:
    """barreld as systemd starts it, with a manager that keeps what it hears."""

    def __init__(self, base: Path) -> None:
        self.dir = base / "run"
        self.state_dir = base / "state"
        self.heard: list[str] = []
        self._lines: deque[str] = deque()
        self._base = base
        self.config = base / "sys.toml"
        self.configure("")
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._manager.bind(f"{base}/notify")
        self._manager.settimeout(DEADLINE_S)
        with (base / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "barrel_inference.supervisor.root", "--config", str(self.config)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={
                    **os.environ, "NOTIFY_SOCKET": f"{base}/notify", "WATCHDOG_USEC": "400000",
                    "LOGS_DIRECTORY": f"{base}/logs",
                },
            )  # fmt: skip

    def configure(self, more: str, ram: str = "64MiB") -> None:
        """Write the configuration file anew."""
        self.config.write_text(CONFIG.format(base=self._base, more=more, ram=ram))

    def hear(self, wanted: str) -> str:
        """The next line that begins with `wanted`; the ones before it are kept in `heard`."""
        until_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < until_s:
            if not self._lines:
                self._lines += self._manager.recv(4096).decode().splitlines()
            self.heard.append(self._lines.popleft())
            if self.heard[-1].startswith(wanted):
                return self.heard[-1]
        raise AssertionError(f"not within {DEADLINE_S} s: {wanted}")

    def end(self) -> int:
        """Stop it as systemd does; the value is its exit status."""
        self.process.terminate()
        # Listening all the while, as a manager does: its socket takes a few datagrams only.
        with contextlib.suppress(TimeoutError, AssertionError):
            self._manager.settimeout(0.2)
            while self.process.poll() is None or self._lines:
                with contextlib.suppress(TimeoutError):
                    self.hear("nothing begins like this")
            self.hear("nothing begins like this")
        self._manager.close()
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def service() -> Iterator[Service]:
    """A service that serves."""
    base = Path(tempfile.mkdtemp(prefix="bs-", dir="/tmp"))
    made = Service(base)
    try:
        made.hear("READY=1")
        yield made
    finally:
        if made.process.poll() is None:
            made.end()
        shutil.rmtree(base)


def test_the_manager_is_told(service: Service) -> None:
    """The watchdog is fed before and after ready, the status says how many processes serve, and the stop is announced."""
    assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in service.heard)
    assert service.hear("STATUS=") == "STATUS=6 of 6 processes serve, 0 of them models"
    service.hear("WATCHDOG=1")
    assert service.end() == 0
    assert "STOPPING=1" in service.heard
    # Its own events too, although they go to the manager's journal: `barrelctl logs` and `doctor` read them here.
    assert sorted(path.stem for path in (service.state_dir.parent / "logs").iterdir()) == [
        "index", "pressure", "router", "supervisor", "tier:disk", "tier:ram", "writer:0",
    ]  # fmt: skip


def test_hangup_reloads(service: Service) -> None:
    """SIGHUP announces a reload, takes up what can change, and says ready again; nothing is restarted by it."""
    with Client(f"ipc://{service.dir}/router") as client:
        before = client.processes()
        service.configure('[models.late]\nmodel_path = "late"\nbackend = "stub"\nautoload = true\n')
        service.process.send_signal(signal.SIGHUP)
        assert service.hear("RELOADING=1")
        assert service.hear("MONOTONIC_USEC=").partition("=")[2].isdigit()
        service.hear("READY=1")
        service.hear("STATUS=7 of 7 processes serve, 1 of them models")
        assert client.complete("late", "hello", response_tokens=2).completion_tokens == 2
        after = client.processes()
    assert {name: pid for name, pid in after.items() if name != "model:late"} == before


def test_reload_says_what_waits(service: Service) -> None:
    """The call names what changed and what waits, processes follow the log level, and a wrong file changes nothing."""
    service.configure('[log]\nlevel = "error"\n[cache]\nsalt = "other"\n')
    assert ask_supervisor(service.dir, Reload(), Reloaded) == Reloaded(changed=["log.level"], pending=["cache.salt"])
    service.configure('[log]\nlevel = "loud"\n')
    with pytest.raises(InvalidArgument, match=r"log\.level = 'loud'"):
        ask_supervisor(service.dir, Reload(), Reloaded)
    service.configure('[log]\nlevel = "error"\n')
    assert ask_supervisor(service.dir, Reload(), Reloaded) == Reloaded(changed=[], pending=[])
    service.end()
    # At `error` a stop is not worth a line; at the `info` of the start it is.
    assert "child.stopping" not in (service.state_dir.parent / "logs" / "router.log").read_text()


def test_reload_changes_quotas(service: Service) -> None:
    """A tier has its new quota at once, without a restart, and keeps it through one."""
    service.configure("", ram="1MiB")
    assert ask_supervisor(service.dir, Reload(), Reloaded) == Reloaded(changed=["tiers.ram.quota_bytes"], pending=[])
    with Client(f"ipc://{service.dir}/router") as client:

        def has_quota() -> bool:
            return ("tier:ram", 1 << 20) in [
                (tier.server, tier.quota_bytes) for tier in client.cache.stats().tiers if tier.up
            ]

        wait_for(has_quota)
        client.restart("tier:ram")
        wait_for(has_quota)


STRANGER = """
import os, sys
from barrel_inference import BarrelError, Client
gid, uid, endpoint = int(sys.argv[1]), 12345, sys.argv[2]
os.setgroups([gid]); os.setresgid(gid, gid, gid); os.setresuid(uid, uid, uid)
with Client(endpoint) as client:
    print([row.model_id for row in client.models()])
    for attempt in range(2):
        print(client.complete("m", "one two three four five six", response_tokens=1).cache_hit_kind)
    for forbidden in (lambda: client.unload("m"), client.counters, client.cache.dump):
        try:
            forbidden()
        except BarrelError as refused:
            print(refused.code)
print(os.access(os.path.dirname(endpoint[6:]), os.R_OK), os.access(endpoint[6:].replace("router", "index"), os.W_OK))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_members_of_the_group_are_tenants() -> None:
    """Another user of the group completes with a cache of its own, may not administer, and reaches no other socket; one who is not
    in the group is told so."""
    group = grp.getgrnam("nogroup")
    base = Path(tempfile.mkdtemp(prefix="bs-", dir="/tmp"))
    base.chmod(0o711)
    config = {
        "runtime": {"dir": str(base / "run"), "state_dir": str(base / "state"), "socket_group": group.gr_name},
        "tiers": {"ram": {"quota_bytes": "64MiB"}, "ram_file": {"enabled": False}, "disk": {"enabled": False}},
        "writer": {"processes": 1},
    }
    start_daemon(read_settings(config))
    try:
        endpoint = f"ipc://{base}/run/router"
        policy = {"min_tokens": 4, "cold_min_tokens": 4, "boundary_trim_tokens": 0, "boundary_align_tokens": 1}
        with Client(endpoint) as client:
            client.load_model("m", "m", backend="stub", policy=policy)
            client.complete("m", "one two three four five six", response_tokens=1)
            said = subprocess.run(
                [sys.executable, "-P", "-c", STRANGER, str(group.gr_gid), endpoint],
                capture_output=True, text=True, check=True, timeout=DEADLINE_S,
            ).stdout.splitlines()  # fmt: skip
            outside = subprocess.run(
                [sys.executable, "-P", "-c", STRANGER, "12345", endpoint],
                capture_output=True, text=True, check=False, timeout=DEADLINE_S,
            ).stderr  # fmt: skip
    finally:
        stop_daemon(base / "run")
        shutil.rmtree(base)
    assert "is closed to this user" in outside
    assert said == ["['m']", "cold", "exact", "not_supported", "not_supported", "not_supported", "False False"]


def test_links_in_its_directories_are_not_followed(tmp_path: Path) -> None:
    """Links in the place of sockets, arenas, black boxes and logs are replaced; what they point to stays as it was."""
    base = Path(tempfile.mkdtemp(prefix="bs-", dir="/tmp"))
    other = tmp_path / "other"
    other.write_text("mine")
    processes = ("supervisor", "router", "index", "tier:ram", "tier:disk", "writer:0", "model:m")
    files = [base / "run" / f"{name}{end}" for name in processes for end in ("", ".arena", ".box")]
    files += [base / "state" / "log" / f"{name}.log" for name in processes]
    for path in files:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.symlink_to(other)
    config = {
        "runtime": {"dir": str(base / "run"), "state_dir": str(base / "state")},
        "tiers": {"ram": {"quota_bytes": "64MiB"}, "ram_file": {"enabled": False}},
        "writer": {"processes": 1},
    }
    start_daemon(read_settings(config))
    try:
        with Client(f"ipc://{base}/run/router") as client:
            client.load_model("m", "m", backend="stub")
            assert client.complete("m", "one two", response_tokens=1).completion_tokens == 1
            opened = [path for path in files if path.exists() and not path.is_symlink()]
        assert {path.name for path in opened} >= {*processes, *(f"{name}.log" for name in processes), "model:m.box"}
    finally:
        stop_daemon(base / "run")
        shutil.rmtree(base)
    assert other.read_text() == "mine"


@pytest.mark.parametrize("name", ["run", "state"])
def test_directories_are_no_links(tmp_path: Path, name: str) -> None:
    """A link in the place of the runtime's own directories is refused, and said to be one."""
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    (tmp_path / name).symlink_to("elsewhere")
    config = {
        "runtime": {
            "dir": str(tmp_path / "run"),
            "state_dir": str(tmp_path / "state"),
            "log_dir": str(tmp_path / "log"),
        }
    }
    with pytest.raises(InvalidArgument, match=rf"/{name}' is a link"):
        start_daemon(read_settings(config))
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o755


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make what belongs to another user")
def test_a_directory_that_another_made_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this user's directory would be in the shared temporary one, nobody gets a prompt but a runtime of this user."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR", "BARREL_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    planted = tmp_path / f"barrel-inference-{os.getuid()}"
    planted.mkdir()
    with socket.socket(socket.AF_UNIX) as trap:
        trap.bind(str(planted / "router"))
        trap.listen()
        trap.setblocking(False)
        os.chown(planted, 12345, 12345)
        with Client() as client, pytest.raises(NoRuntime, match="was made by another user"):
            client.models()
        with pytest.raises(BlockingIOError):
            trap.accept()


def test_models_come_from_their_roots(tmp_path: Path) -> None:
    """With `limits.model_roots` a path outside of it is refused, also through a link inside of it."""
    (tmp_path / "in").mkdir()
    (tmp_path / "out.gguf").write_bytes(b"GGUF")
    (tmp_path / "in" / "link.gguf").symlink_to(tmp_path / "out.gguf")
    (tmp_path / "in" / "m-00001-of-00002.gguf").write_bytes(b"GGUF")
    (tmp_path / "in" / "m-00002-of-00002.gguf").symlink_to(tmp_path / "out.gguf")
    config = {
        "limits": {"model_roots": [str(tmp_path / "in")]},
        "tiers": {"ram": {"quota_bytes": "64MiB"}, "ram_file": {"enabled": False}, "disk": {"enabled": False}},
    }
    with Runtime(config) as runtime, runtime.client() as client:
        for path in ("out.gguf", "in/../out.gguf", "in/link.gguf", "in/../\udcff.gguf", "in/m-00001-of-00002.gguf"):
            with pytest.raises(InvalidArgument, match="model_roots"):
                client.load_model(str(tmp_path / path), "m")
        with pytest.raises(InvalidArgument, match="model_roots"):
            client.load_model((tmp_path / "out.gguf").as_uri(), "m")
        with pytest.raises(InvalidArgument, match="model_roots"):
            client.load_model(str(tmp_path / "in" / "m.gguf"), "m", adapters=[(str(tmp_path / "a.gguf"), 1.0)])
        with pytest.raises(BadModel):
            client.load_model(str(tmp_path / "in" / "absent \udcff.gguf"), "m")
