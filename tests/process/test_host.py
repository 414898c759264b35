"""What a host does to a runtime: a clock that jumps, limits of memory, of locked memory and of descriptors."""

import contextlib
import resource
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from barrel_inference import Client, InvalidArgument, Runtime
from barrel_inference.tiers.headroom import RESERVE_BYTES
from tests.process.killing import POLICY, came_back, kill, read, wait_for
from tests.process.tier_harness import small_file_system

MIB = 1 << 20
PROMPT = list(range(1, 61))
SKEWED = Path(__file__).parents[1] / "children" / "skewed"  # makes the clock of whoever has it on its path be wrong
YEAR_S = 365 * 86400.0
SMALL: dict[str, Any] = {
    "tiers": {"ram": {"quota_bytes": "16MiB"}, "ram_file": {"enabled": False}, "disk": {"quota_bytes": "1MiB"}},
    "writer": {"processes": 1},
}  # fmt: skip


def stub(client: Client, name: str, *, tier: str = "disk", **opts: Any) -> str:
    """A stub model under this name."""
    return client.load_model(name, name, backend="stub", tier=tier, policy=POLICY, model_opts=opts)


# --- the wall clock ---------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set years ahead and back, in a reply and between runtimes: the same answers, warm ones, room for new rows, no deaths."""
    clock = tmp_path / "clock"

    def set_ahead(years: int) -> None:
        fresh = tmp_path / "fresh"  # whoever reads finds one or the other
        fresh.write_text(str(years * YEAR_S))
        fresh.rename(clock)

    set_ahead(0)
    monkeypatch.setenv("SKEW_FILE", str(clock))
    monkeypatch.setenv("PYTHONPATH", str(SKEWED))
    config = SMALL | {"supervisor": {"intensity": 0, "model_intensity": 0}}
    with Runtime(config, state_dir=tmp_path / "state") as runtime, runtime.client() as client:
        model = stub(client, "m", bytes_per_token=1024, step_ms=1)
        pids = runtime.processes()
        cold = client.complete(model, PROMPT, response_tokens=40)
        for years in (30, -20):
            set_ahead(years)
            with client.stream(model, [years % 7, *PROMPT], response_tokens=40, deadline_s=60.0) as stream:
                seen = read(stream, lambda years=years: set_ahead(-years))  # type: ignore[misc]
            assert seen.end.finish_reason == "length"
            again = client.complete(model, PROMPT, response_tokens=40, deadline_s=60.0)
            assert (again.generated, again.cache_hit_kind) == (cold.generated, "exact")
        assert runtime.processes() == pids
    set_ahead(-10)
    with Runtime(config, state_dir=tmp_path / "state") as runtime, runtime.client() as client:
        model = stub(client, "m", bytes_per_token=1024)
        wait_for(lambda: client.cache.dump(), "the index knows the rows")
        again = client.complete(model, PROMPT, response_tokens=40)
        assert (again.generated, again.hit_source) == (cold.generated, "disk")
        for number in range(20):  # more than there is room for
            client.complete(model, [1000 + number, *PROMPT], response_tokens=4)
        wait_for(lambda: not [r for r in client.cache.dump() if r.status == "writing"], "all is written")
        last = client.complete(model, [1019, *PROMPT], response_tokens=4)  # what a future date keeps would push it out
        assert last.cache_hit_kind == "exact"


# --- a full disk under everything -------------------------------------------------------------------------------------


def test_a_state_directory_without_room(tmp_path: Path) -> None:
    """Where not even a log line can be written, answers go on, and who dies comes back."""
    with (
        small_file_system(tmp_path) as small,
        Runtime(SMALL, state_dir=small / "state") as runtime,
        runtime.client() as client,
    ):
        model = stub(client, "m", bytes_per_token=4096)
        whole = client.complete(model, PROMPT, response_tokens=4).generated
        with contextlib.suppress(OSError), (small / "everything").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        pids = runtime.processes()
        for number in range(30):
            client.complete(model, [1000 + number, *PROMPT], response_tokens=4, deadline_s=30.0)
        assert runtime.processes() == pids
        for victim in ("router", "index", "tier:disk", f"model:{model}"):
            came_back(runtime, victim, kill(runtime, victim))
            assert client.complete(model, PROMPT, response_tokens=4, deadline_s=30.0).generated == whole


# --- limits -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def elsewhere(before: str, config: Mapping[str, Any]) -> Iterator[Client]:
    """A client of a runtime whose processes live under what the code `before` sets."""
    code = (
        f"import ctypes, os, resource, sys\n{before}\n"
        "from barrel_inference import Runtime\n"
        f"with Runtime({dict(config)!r}) as runtime:\n"
        "    print(runtime.endpoint, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    script = subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    with script:
        assert script.stdin is not None
        assert script.stdout is not None
        try:
            with Client(script.stdout.readline().strip()) as client:
                yield client
        finally:
            script.stdin.close()


def limit_of(pid: int, name: str) -> int:
    """A limit of a process, as it holds now."""
    line = next(line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if line.startswith(name))
    return int(line.removeprefix(name).split()[0])


# Root may lock whatever the limit says, unless that power is given up for good (PR_CAPBSET_DROP, CAP_IPC_LOCK).
LOCK_64_KIB = "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536)); ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)\n"


def test_little_may_be_locked(tiny_models: Mapping[str, Path]) -> None:
    """Where the weights may not be locked, a model that asks for it answers all the same, and its log says what to raise."""
    with elsewhere(LOCK_64_KIB, SMALL) as client:
        opts = {"use_mlock": True, "pin_resident_after_first_request": True}
        model = client.load_model(tiny_models["dense"], "m", model_opts=opts, context_opts={"n_ctx": 256})
        assert client.complete(model, PROMPT, response_tokens=4).completion_tokens == 4
        assert client.complete(model, PROMPT, response_tokens=4).cache_hit_kind == "exact"
        log = (Path(client.status()["state_dir"]) / "log" / "model:m.log").read_text()
        assert "the limit is 65536 bytes (ulimit -l, or LimitMEMLOCK= of the service)" in log


def test_descriptors_are_raised_to_what_is_allowed() -> None:
    """A shell's soft limit does not count: every process may open as many files as the hard limit says."""
    with elsewhere("resource.setrlimit(resource.RLIMIT_NOFILE, (150, 300))", SMALL) as client:
        assert {limit_of(pid, "Max open files") for pid in client.processes().values()} == {300}


def test_too_few_descriptors(tmp_path: Path) -> None:
    """Below what a runtime needs it does not start, and says which limit to raise."""
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n"
        "from barrel_inference import Runtime\n"
        "Runtime()\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert InvalidArgument.__name__ in done.stderr
    assert "a process may open 100 files here, a runtime needs 128 — raise `ulimit -n`" in done.stderr


def made_group(limit_bytes: int) -> Path | None:
    """A new control group that kills whoever takes more; None where we cannot make one."""
    for base, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(base) / f"barrel-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(limit_bytes))
            return group
        except OSError:  # of the other version of control groups, or without the memory controller
            group.rmdir()
    return None


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of 400 MiB."""
    group = made_group(400 * MIB)
    if group is None:
        pytest.skip("a control group with a memory limit needs root")
    yield group
    wait_for(lambda: not (group / "cgroup.procs").read_text(), "everybody has left")
    group.rmdir()


def test_a_memory_limit_that_the_ram_tier_would_break(memory_group: Path) -> None:
    """A quota above what the control group allows is lowered with a note; filling the cache kills nobody."""
    config = SMALL | {"tiers": SMALL["tiers"] | {"ram": {"quota_bytes": "4GiB"}}}
    join = f"open({str(memory_group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
    with elsewhere(join, config) as client:
        model = stub(client, "m", tier="ram", bytes_per_token=100_000)
        pids = client.processes()
        tier = next(one for one in client.cache.stats().tiers if one.server == "tier:ram")
        assert tier.quota_bytes < 400 * MIB - RESERVE_BYTES
        assert tier.note
        whole = client.complete(model, PROMPT, response_tokens=4).generated
        for number in range(30):
            client.complete(model, [1000 + number, *PROMPT], response_tokens=4)
        assert client.complete(model, PROMPT, response_tokens=4).generated == whole
        assert client.counters()["bytes_ram"] > 0
        assert client.processes() == pids


def test_few_descriptors() -> None:
    """With a low limit of descriptors, more clients than it allows do no harm to those that are connected."""
    own = resource.getrlimit(resource.RLIMIT_NOFILE)
    with elsewhere("resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))", SMALL) as client:
        model = client.load_model("none", backend="stub", context_opts={"n_ctx": 4096})
        pids = client.processes()
        whole = client.complete(model, PROMPT, response_tokens=4).generated
        crowd = flood_with_connections(client.endpoint.removeprefix("ipc://"), 400)
        assert client.complete(model, PROMPT, response_tokens=4).generated == whole
        assert client.processes() == pids
        for one in crowd:
            one.close()
        with Client(client.endpoint) as late:
            assert late.complete(model, PROMPT, response_tokens=4).generated == whole
    assert own == resource.getrlimit(resource.RLIMIT_NOFILE)


def flood_with_connections(path: str, count: int) -> list[Any]:
    """That many connections to a socket, as far as its process takes them."""
    made = []
    for _ in range(count):
        one = socket.socket(socket.AF_UNIX)
        one.setblocking(False)
        try:
            one.connect(path)
        except BlockingIOError:
            one.close()
            break
        made.append(one)
    return made
