"""Private runtimes and the daemon, as whole trees of real processes."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from barrel_inference import config
from barrel_inference.errors import InvalidArgument, NoRuntime
from barrel_inference.protocol import TreeRows, TreeStatus
from barrel_inference.runtime import Runtime, ask_supervisor, read_settings, start_daemon, stop_daemon

DEADLINE_S = 30
SMALL = {"tiers": {"ram": {"quota_bytes": "16MiB"}, "ram_file": {"quota_bytes": "16MiB"}}}


def is_gone(pid: int) -> bool:
    """Whether the process ends within the deadline."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], DEADLINE_S)[0])
    finally:
        os.close(descriptor)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose sockets the kernel accepts."""
    path = Path(tempfile.mkdtemp(prefix="bt-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def test_a_removed_runtime_directory_ends_the_runtime() -> None:
    """Nobody could find it any more, or start another: it stops by itself, and every process is gone."""
    with Runtime(SMALL) as runtime:
        pids = runtime.processes().values()
        shutil.rmtree(runtime.runtime_dir)
        assert all(is_gone(pid) for pid in pids)


def test_private_runtime_leaves_nothing() -> None:
    """Every process of the tree runs inside the block; after it none does, and no directory of it is left."""
    with Runtime(SMALL) as runtime:
        pids = runtime.processes()
        assert {"supervisor", "router", "index", "tier:ram", "tier:ram_file", "tier:disk", "writer:0"} <= set(pids)
        assert runtime.endpoint == f"ipc://{runtime.runtime_dir}/router"
        places = [runtime.runtime_dir, runtime.state_dir, Path(runtime.settings.tiers["ram_file"].root)]
        assert all(place.exists() for place in places[:2])
    assert all(is_gone(pid) for pid in pids.values())
    assert not any(place.exists() for place in places)


def test_state_dir_is_kept(tmp_path: Path) -> None:
    """A state directory that was given is kept, and a second runtime finds the same places again."""
    with Runtime(SMALL, state_dir=tmp_path) as runtime:
        roots = [tier.root for tier in runtime.settings.tiers.values()]
    assert (tmp_path / "log" / "supervisor.log").exists()
    with Runtime(SMALL, state_dir=tmp_path) as again:
        assert [tier.root for tier in again.settings.tiers.values()] == roots
    assert not config.ram_file_root(tmp_path).exists()  # nothing was saved there


def test_leaving_after_the_supervisor_was_killed() -> None:
    """Leaving the block after SIGKILL of the supervisor raises nothing, waits for every process, and cleans up."""
    with Runtime(SMALL) as runtime:
        pids = runtime.processes()
        os.kill(pids["supervisor"], signal.SIGKILL)
    assert all(is_gone(pid) for pid in pids.values())
    assert not runtime.runtime_dir.exists()
    assert not runtime.state_dir.exists()
    with pytest.raises(NoRuntime):
        runtime.processes()


def test_a_killed_script_takes_its_runtime_along() -> None:
    """When the program that owns a private runtime is killed, the runtime stops and removes what was temporary."""
    script = (
        "import json, sys; from barrel_inference.runtime import Runtime; r = Runtime();"
        "print(json.dumps([r.processes(), str(r.runtime_dir), str(r.state_dir)]), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids, runtime_dir, state_dir = json.loads(process.stdout.readline())
        process.kill()
    assert all(is_gone(pid) for pid in pids.values())
    assert not Path(runtime_dir).exists()
    assert not Path(state_dir).parent.exists()


def test_wrong_configuration_is_refused_before_anything_starts() -> None:
    """All problems of a configuration are raised by the constructor."""
    with pytest.raises(InvalidArgument, match=r"2 problems"):
        Runtime({"log": {"level": "loud"}, "writer": {"processes": 0}})


def test_daemon_starts_once_and_stops(short_dir: Path) -> None:
    """`start_daemon` returns when everything is ready, a second one is refused, and `stop_daemon` ends all of it."""
    tiers = ["tiers.ram.quota_bytes=16MiB", "tiers.ram_file.enabled=false"]
    settings = config.resolve(read_settings(sets=tiers), runtime_dir=short_dir / "run", state_dir=short_dir / "state")
    pid = start_daemon(settings)
    rows = ask_supervisor(short_dir / "run", TreeStatus(), TreeRows)
    assert rows.supervisor_pid == pid
    assert {row.state for row in rows.children} == {"ready"}
    with pytest.raises(InvalidArgument, match="is in use by another runtime"):
        start_daemon(settings)
    stop_daemon(short_dir / "run", timeout_s=DEADLINE_S)
    assert is_gone(pid)
    assert not (short_dir / "run").exists()
    with pytest.raises(NoRuntime):
        stop_daemon(short_dir / "run")


def test_one_state_directory_serves_one_runtime(tmp_path: Path) -> None:
    """Two runtimes never write into one state directory."""
    with Runtime(SMALL, state_dir=tmp_path), pytest.raises(InvalidArgument, match="state_dir"):
        Runtime(SMALL, state_dir=tmp_path)
    shutil.rmtree(config.ram_file_root(tmp_path), ignore_errors=True)
