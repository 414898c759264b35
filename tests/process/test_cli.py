"""barrelctl as a person or a script uses it: output, exit codes, interrupts. One daemon for the module."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from barrel_inference import Client
from tests.process.killing import wait_for

DEADLINE_S = 60
BARRELCTL = [sys.executable, "-P", "-m", "barrel_inference.cli.main"]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A short directory for sockets and state, with a configuration."""
    path = Path(tempfile.mkdtemp(prefix="bt-", dir="/tmp"))
    (path / "sys.toml").write_text(
        f"""
        [runtime]
        dir = "{path}/run"
        state_dir = "{path}/state"
        [tiers.ram]
        quota_bytes = "64MiB"
        [tiers.ram_file]
        enabled = false
        [writer]
        processes = 1
        [models.named]
        backend = "stub"
        model_path = "any"
        context_opts = {{ n_ctx = 512 }}
        """
    )
    yield path
    shutil.rmtree(path, ignore_errors=True)


def environment(folder: Path) -> dict[str, str]:
    """What barrelctl is run with: the module's runtime is the default one."""
    return {**os.environ, "BARREL_ENDPOINT": f"{folder}/run/router", "XDG_STATE_HOME": str(folder)}


def run(folder: Path, *arguments: str, text: str = "") -> "subprocess.CompletedProcess[str]":
    """Run barrelctl; its outputs are no terminals."""
    return subprocess.run(
        [*BARRELCTL, *arguments], input=text, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        env=environment(folder),
    )  # fmt: skip


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Path]:
    """A started runtime with a model `tiny`; stopped by barrelctl at the end."""
    started = run(folder, "start", "--config", str(folder / "sys.toml"))
    assert (started.returncode, started.stdout) == (0, ""), started.stderr
    options = ("model_opts.step_ms=5", "context_opts.n_ctx=4096", "backend=stub")
    loaded = run(folder, "load", "any", "--id", "tiny", *(part for option in options for part in ("--set", option)))
    assert (loaded.returncode, loaded.stdout) == (0, "tiny\n"), loaded.stderr
    yield folder
    stopped = run(folder, "stop")
    assert (stopped.returncode, stopped.stdout) == (0, ""), stopped.stderr
    assert not (folder / "run").exists() or not list((folder / "run").iterdir())


def test_complete(daemon: Path) -> None:
    """The reply goes to standard output, the figures to standard error; streamed or not, the text is the same."""
    streamed = run(daemon, "complete", "tiny", "1 2 3", "--tokens", "4", "--stats")
    assert (streamed.returncode, len(streamed.stdout.split())) == (0, 4)
    assert "of 3 prompt tokens reused" in streamed.stderr
    assert run(daemon, "complete", "tiny", "--tokens", "4", "--no-stream", text="1 2 3").stdout == streamed.stdout


def test_json_documents(daemon: Path) -> None:
    """`--json` prints one document and nothing else."""
    result = json.loads(run(daemon, "complete", "tiny", "4 5", "--tokens", "2", "--json").stdout)
    assert (result["completion_tokens"], result["prompt_tokens"], result["finish_reason"]) == (2, 2, "length")
    status = json.loads(run(daemon, "status", "--json").stdout)
    assert [model["model_id"] for model in status["models"]] == ["tiny"]
    assert {"supervisor", "router", "model:tiny"} <= {
        row["id"] for row in json.loads(run(daemon, "ps", "--json").stdout)
    }
    assert "counters" in json.loads(run(daemon, "cache", "stats", "--json").stdout)
    assert isinstance(json.loads(run(daemon, "cache", "ls", "--json").stdout), list)


def test_the_cache_as_a_table(daemon: Path) -> None:
    """`cache ls` shows what a row is, of which model and prompt; a tier is named by its kind or its server; gc empties it."""
    policy = ("min_tokens=4", "cold_min_tokens=4", "boundary_trim_tokens=0", "boundary_align_tokens=1")
    sets = [part for gate in policy for part in ("--set", f"policy.{gate}")]
    assert run(daemon, "load", "named", "--id", "listed", "--tier", "disk", *sets).returncode == 0
    run(daemon, "complete", "listed", "70 71 72 73 74 75 76 77", "--tokens", "1")
    for tier in ("disk", "tier:disk"):
        wait_for(lambda tier=tier: "finish" in run(daemon, "cache", "ls", "--tier", tier).stdout)  # type: ignore[misc]
    head, *lines = run(daemon, "cache", "ls").stdout.splitlines()
    assert head.split() == ["key", "model", "tier", "tokens", "size", "age", "hits", "reason", "state", "prompt"]
    cold = next(line for line in lines if " cold " in line)
    assert cold.split()[1:4] == ["listed", "disk", "8"]
    assert cold.endswith("70 71 72 73 74 75")
    assert run(daemon, "cache", "ls", "--tier", "ram").stdout == ""
    stats = run(daemon, "cache", "stats").stdout
    assert "tier:disk" in stats
    assert "saves_cold" in stats
    assert "rows evicted" in run(daemon, "cache", "gc").stdout
    assert run(daemon, "cache", "ls").stdout == ""
    assert run(daemon, "unload", "listed").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["complete", "tini", "x"], 4, "did you mean 'tiny'"),
        (["complete", "tiny", ""], 2, "prompt is empty"),
        (["complete", "tiny", "x", "--temperature", "-1"], 2, "temperature = -1"),
        (["complete", "tiny", "x", "--tokens", "many"], 2, "--tokens"),
        (["load", "nonesuch"], 4, "nonesuch"),
        (["load", "name"], 4, "did you mean 'named'"),
        (["load", "/no/such/file.gguf"], 4, "/no/such/file.gguf"),
        (["load", "pkg:no-such-distribution"], 4, "no-such-distribution"),
        (["load", "x", "--set", "backend=stub", "--set", "context_opts.n_ctxx=1"], 2, "context_opts.n_ctxx"),
        (["load", "x", "--set", "backend=stub", "--id", ""], 2, "model_id = ''"),
        (["load", "x", "--set", "backend=stub", "--id", "a b"], 2, "model_id = 'a b'"),
        (["load", "x", "--set", "backend=stub", "--id", "x" * 100], 2, "is too long"),
        (["load", "x", "--set", "backend=stub", "--id", "tiny"], 1, "'tiny' is loaded already"),
        (["load", "x", "--set", "backend=stub", "--id", "\udcff"], 2, "'\\udcff' is no valid text"),
        (["load", "x", "--set", "backend=stub", "--set", f"fingerprint={'1' * 64}"], 2, "cannot be sent"),
        (["load", "x", "--set", "backend=stub", "--set", "model_path=y"], 2, "model_path = 'y'"),
        (["load", "x", "--set", "backend=stub", "--set", "adapters=5"], 2, "adapters = 5"),
        (["load", "x", "--set", "backend=stub", "--tier", "tape"], 2, "none of ram, ram_file, disk"),
        (["load", "/"], 1, "is a directory"),
        (["load", "/dev/null"], 1, "is no regular file"),
        (["load", "/no/such \udcff.gguf"], 4, "/no/such \\udcff.gguf"),
        (["unload", "other"], 4, "loaded: tiny"),
        (["restart", "indx"], 4, "did you mean 'index'"),
        (["cache", "evict", "lots"], 2, "lots"),
        (["cache", "evict", "1", "--tier", "tape"], 2, "tape"),
        (["cache", "ls", "--tier", "tape"], 2, "tape"),
        (["nonsense"], 2, "nonsense"),
        (["config", "check", "/no/such.toml"], 2, "/no/such.toml"),
    ],
)
def test_errors(daemon: Path, arguments: list[str], code: int, said: str) -> None:
    """An error is one line on standard error, with the value, and an exit code that says what kind it is."""
    failed = run(daemon, *arguments)
    assert (failed.returncode, failed.stdout) == (code, "")
    assert said in failed.stderr
    assert len(failed.stderr.splitlines()) == 1
    assert failed.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("sta", ["start", "status"]), ("cache e", ["evict"]), ("complete --gra", ["--grammar"]), ("complete t", ["tiny"]),
     ("unload t", ["tiny"]), ("unload x", []), ("restart tier", ["tier:disk", "tier:ram"]), ("logs i", ["index"])],
)  # fmt: skip
def test_shell_completion(daemon: Path, typed: str, offered: list[str]) -> None:
    """bash, with the script that barrelctl prints, offers commands, options, and the ids of models and processes."""
    words = ["barrelctl", *typed.split()]
    script = (
        f'eval "$(barrelctl --show-completion)"; COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}\n'
        '_barrelctl_completion barrelctl && printf "%s\\n" "${COMPREPLY[@]}"'
    )
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment(daemon) | path, capture_output=True, text=True, check=True,
        timeout=DEADLINE_S,
    )  # fmt: skip
    assert (sorted(done.stdout.split()), done.stderr) == (offered, "")


def test_named_model(daemon: Path) -> None:
    """A name of [models] brings its options, and is the id; unloading says so on standard error."""
    assert run(daemon, "load", "named").stdout == "named\n"
    with Client(f"{daemon}/run/router") as client:
        assert client.model_info("named").context_size == 512
    unloaded = run(daemon, "unload", "named")
    assert (unloaded.returncode, unloaded.stdout) == (0, "")


def test_interrupt(daemon: Path) -> None:
    """Ctrl-C ends `complete` with 130, and the request in the runtime."""
    with Client(f"{daemon}/run/router") as client:
        command = [*BARRELCTL, "complete", "tiny", "1 2 3", "--tokens", "4000"]
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment(daemon))
        wait_for(lambda: client.queue_depth("tiny") == 1)
        running.send_signal(signal.SIGINT)
        assert running.wait(DEADLINE_S) == 130
        wait_for(lambda: client.queue_depth("tiny") == 0)


def test_interrupted_load(daemon: Path) -> None:
    """Ctrl-C ends `load` with 130, and the load in the runtime."""
    with Client(f"{daemon}/run/router") as client:
        options = ("--set", "backend=stub", "--set", "model_opts.load_ms=60000")
        running = subprocess.Popen([*BARRELCTL, "load", "any", "--id", "long", *options], env=environment(daemon))
        wait_for(lambda: "model:long" in client.processes())
        running.send_signal(signal.SIGINT)
        assert running.wait(DEADLINE_S) == 130
        wait_for(lambda: "model:long" not in client.processes())
        wait_for(lambda: "long" not in [info.model_id for info in client.models()])


def test_closed_pipe(daemon: Path) -> None:
    """When whoever reads our output has enough, barrelctl ends quietly and the request with it."""
    command = [*BARRELCTL, "complete", "tiny", "1 2 3", "--tokens", "4000"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(daemon))
    assert running.stdout is not None
    running.stdout.read(5)
    running.stdout.close()
    assert running.wait(DEADLINE_S) == 1
    assert running.stderr is not None
    with running.stderr as stderr:
        assert stderr.read() == b""
    with Client(f"{daemon}/run/router") as client:
        wait_for(lambda: client.queue_depth("tiny") == 0)


def test_closed_pipe_of_a_short_output(folder: Path) -> None:
    """The same for what fits into a buffer, and is written at the end."""
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([*BARRELCTL, "--version"], stdout=theirs, stderr=subprocess.PIPE, env=environment(folder))
    os.close(theirs)
    assert (done.returncode, done.stderr) == (1, b"")


def on_a_terminal(folder: Path, *arguments: str, typed: bytes = b"", **variables: str) -> tuple[int, bytes]:
    """Exit code and what a terminal shows of a command."""
    ours, theirs = pty.openpty()
    os.write(ours, typed)
    running = subprocess.Popen(
        [*BARRELCTL, *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
        env={**environment(folder), "TERM": "xterm", "COLUMNS": "200", **variables},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        shown += chunk
    os.close(ours)
    return running.wait(DEADLINE_S), shown


def test_confirmations(daemon: Path) -> None:
    """What ends requests or empties the cache asks on a terminal: no changes nothing, yes does it, --yes is not asked."""
    with Client(f"{daemon}/run/router") as client:
        client.load_model("x", "busy", backend="stub", model_opts={"step_ms": 20}, context_opts={"n_ctx": 4096},
                          policy={"min_tokens": 4, "cold_min_tokens": 4, "boundary_trim_tokens": 0, "boundary_align_tokens": 1})  # fmt: skip
        with client.stream("busy", "1 2 3 4 5 6 7 8", response_tokens=4000) as stream:
            next(stream)
            wait_for(lambda: client.counters()["bytes_ram"] > 0)
            for arguments, asked in (
                (("unload", "busy"), b"Unload busy? 1 request will end."),
                (("stop",), b"Stop the runtime? 1 request will end."),
                (("cache", "gc"), b"Evict everything"),
                (("cache", "evict", "1GiB", "--tier", "ram"), b"Evict everything"),
            ):
                code, shown = on_a_terminal(daemon, *arguments, typed=b"n\n")
                assert (code, asked in shown) == (130, True), shown
            assert (client.phase("busy"), client.counters()["bytes_ram"] > 0) == ("generating", True)
            assert b"?" not in on_a_terminal(daemon, "cache", "evict", "1", "--yes")[1]
            code, shown = on_a_terminal(daemon, "unload", "busy", typed=b"y\n")
            assert (code, b"busy is unloaded" in shown) == (0, True), shown
        code, shown = on_a_terminal(daemon, "cache", "gc", "--yes")
        assert (code, b"?" in shown) == (0, False)


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colours(daemon: Path, no_color: str, coloured: bool) -> None:
    """Colours are for terminals, unless NO_COLOR is set."""
    code, shown = on_a_terminal(daemon, "status", NO_COLOR=no_color)
    assert code == 0
    assert b"model:tiny" in shown
    assert (b"\x1b[32m" in shown) is coloured


def test_progress_bar(daemon: Path) -> None:
    """A load shows a bar on a terminal, and none in a pipe."""
    options = ("--set", "backend=stub", "--set", "model_opts.load_ms=300")
    code, shown = on_a_terminal(daemon, "load", "any", "--id", "barred", *options)
    assert (code, b"%" in shown, b"loading any" in shown) == (0, True, True)
    run(daemon, "unload", "barred")
    piped = run(daemon, "load", "any", "--id", "barred", *options)
    assert (piped.stdout, piped.stderr) == ("barred\n", "")
    run(daemon, "unload", "barred")


def test_logs_and_doctor(daemon: Path) -> None:
    """The logs of one process or of all are printed by time; the doctor finds nothing broken."""
    assert "child.ready" in run(daemon, "logs", "router").stdout
    assert "supervisor.ready" in run(daemon, "logs", "-n", "1000").stdout
    doctor = json.loads(run(daemon, "doctor", "--json").stdout)
    states = {finding["name"]: finding["state"] for finding in doctor["findings"]}
    assert (states["runtime"], states["llama.cpp"], states["model:tiny"]) == ("ok", "ok", "ok")


def test_config(folder: Path) -> None:
    """`config show` prints TOML that `config check` accepts; a bad file's problems come all at once, a line each."""
    shown = run(folder, "config", "show", str(folder / "sys.toml"))
    again = folder / "again.toml"
    again.write_text(shown.stdout)
    assert run(folder, "config", "check", str(again)).returncode == 0
    bad = folder / "bad.toml"
    bad.write_text("[limits]\nmax_requests = -1\n[writer]\nprocesses = 0\n")
    checked = run(folder, "config", "check", str(bad))
    assert checked.returncode == 2
    assert "limits.max_requests" in checked.stderr
    assert "writer.processes" in checked.stderr


def test_no_runtime(tmp_path: Path) -> None:
    """Without a runtime the exit code is 3, with what to do; help and version need none."""
    for arguments in (["status"], ["stop"], ["complete", "tiny", "x"], ["unload", "tiny"], ["cache", "ls"]):
        absent = run(tmp_path, *arguments)
        assert (absent.returncode, absent.stdout) == (3, ""), absent.stderr
        assert "barrelctl start" in absent.stderr
    assert run(tmp_path, "--version").stdout.startswith("barrelctl ")
    assert "Example: barrelctl complete" in run(tmp_path, "complete", "--help").stdout
