"""The real root supervisor over children that behave and misbehave (tests/children)."""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from barrel_inference import codec, protocol
from barrel_inference.errors import AlreadyLoaded, BadModel, NotFound
from barrel_inference.protocol import (
    ChildRow,
    ChildSpec,
    Header,
    Kind,
    LoadProgress,
    Ok,
    RestartChild,
    StartChild,
    StopChild,
    StopTree,
    TreeRows,
    TreeStatus,
)
from barrel_inference.runtime import ask_supervisor

TESTS = Path(__file__).parents[1]
DEADLINE_S = 30  # of a poll; a two-core machine under load is slow, not wrong


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The first true value of `condition`, polled."""
    until_s = time.monotonic() + deadline_s
    while time.monotonic() < until_s:
        if found := condition():
            return found
        select.select([], [], [], 0.01)
    raise AssertionError(f"not within {deadline_s} s: {what}")


class Tree:
    """A running supervisor over a tree of test children."""

    def __init__(self, base: Path, specs: list[ChildSpec], sets: list[str], stdin: int | None = None) -> None:
        self.dir, self.state_dir = base / "run", base / "state"
        base.joinpath("tree.json").write_bytes(msgspec.json.encode(specs))
        self.alive_fd, alive_fd = os.pipe()
        ready_fd, child_ready_fd = os.pipe()
        self.log_path = base / "supervisor.log"
        command = [sys.executable, "-P", "-m", "barrel_inference.supervisor.root", "--tree", str(base / "tree.json")]
        command += ["--ready-fd", str(child_ready_fd), "--alive-fd", str(alive_fd)]
        for assignment in (f"runtime.dir={self.dir}", f"runtime.state_dir={self.state_dir}", *sets):
            command += ["--set", assignment]
        if stdin is not None:
            command.append("--tied")
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=stdin or subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[alive_fd, child_ready_fd],
                env={**os.environ, "PYTHONPATH": str(TESTS)},
            )  # fmt: skip
        os.close(alive_fd)
        os.close(child_ready_fd)
        with os.fdopen(ready_fd, "rb") as ready:
            self.started = json.loads(ready.read() or b"null")

    def ask(self, message: protocol.Message, reply: type[Any] = Ok) -> Any:
        """Call the supervisor."""
        return ask_supervisor(self.dir, message, reply, timeout_s=DEADLINE_S)

    def rows(self) -> dict[str, ChildRow]:
        """The children by id."""
        return {row.id: row for row in self.ask(TreeStatus(), TreeRows).children}

    def wait_row(self, child_id: str, condition: Callable[[ChildRow], bool], what: str) -> ChildRow:
        """The child's row once it is as wanted."""

        def look() -> ChildRow | None:
            row = self.rows().get(child_id)
            return row if row is not None and condition(row) else None

        found = wait_for(look, f"{child_id} {what}")
        assert isinstance(found, ChildRow)
        return found

    def log(self, child_id: str | None = None) -> list[dict[str, Any]]:
        """The log events of a child, or of the supervisor."""
        path = self.log_path if child_id is None else self.state_dir / "log" / f"{child_id}.log"
        return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]

    def everything_is_gone(self, deadline_s: float = DEADLINE_S) -> bool:
        """Whether every process has ended: then nobody holds the other end of the pipe that all inherit."""
        return bool(select.select([self.alive_fd], [], [], deadline_s)[0])

    def end(self) -> int:
        """Stop it like a service manager does; the value is its exit status."""
        self.process.terminate()
        return self.process.wait(DEADLINE_S)


Start = Callable[..., Tree]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start supervisors; at the end each is stopped, and nothing of it is left."""
    base = Path(tempfile.mkdtemp(prefix="bt-", dir="/tmp"))
    trees: list[Tree] = []

    def start_tree(*specs: ChildSpec, sets: list[str] | None = None, stdin: int | None = None) -> Tree:
        tree = Tree(base, list(specs), sets or [], stdin)
        trees.append(tree)
        return tree

    yield start_tree
    for tree in trees:
        tree.end()
        assert tree.everything_is_gone()
        os.close(tree.alive_fd)
    assert not (base / "run").exists()
    shutil.rmtree(base)


def child(child_id: str, module: str = "well_behaved", **fields: Any) -> ChildSpec:
    """A specification of one of the test children."""
    return ChildSpec(id=child_id, module=f"children.{module}", **fields)


def model(child_id: str, module: str = "well_behaved", **fields: Any) -> ChildSpec:
    """A test child that plays a model."""
    return child(child_id, module, group="model", restart="transient", **fields)


def is_ready(row: ChildRow) -> bool:
    return row.state == "ready"


def test_ready_children_know_each_other(start: Start) -> None:
    """When all are ready, each has been told of every other and of what it says about itself."""
    tree = start(child("a"), child("b"))
    assert tree.started["error"] is None
    for own, other in (("a", "b"), ("b", "a")):
        ups = wait_for(lambda own=own: [e for e in tree.log(own) if e["event"] == "peer.up"], f"{own} hears of {other}")  # type: ignore[misc]
        assert [(up["peer"], up["about"]) for up in ups] == [(other, {"answer": 42})]


def test_killed_child_is_replaced(start: Start) -> None:
    """A child that dies by SIGKILL is replaced, its peers learn of the death and of the new one, siblings go on."""
    tree = start(child("a"), child("b"))
    before = tree.rows()
    killed_s = time.monotonic()
    assert before["b"].pid is not None
    os.kill(before["b"].pid, signal.SIGKILL)
    row = tree.wait_row("b", lambda row: is_ready(row) and row.incarnation > before["b"].incarnation, "comes back")
    assert time.monotonic() - killed_s < DEADLINE_S
    assert (row.restarts, row.reason) == (1, "signal SIGKILL")
    assert tree.rows()["a"].pid == before["a"].pid
    events = wait_for(
        lambda: (e := [(e["event"], e.get("peer")) for e in tree.log("a") if "peer" in e])[2:] and e, "a is told"
    )
    assert events == [("peer.up", "b"), ("peer.down", "b"), ("peer.up", "b")]


def test_death_at_start_is_final(start: Start) -> None:
    """A child that dies before it was ready is failed at once with its last words, burns nothing, and the others serve."""
    tree = start(child("a"), child("bad", "dies_at_start"), sets=["supervisor.intensity=0"])
    assert tree.started["error"] is None
    rows = tree.rows()
    assert (rows["a"].state, rows["bad"].state, rows["bad"].restarts) == ("ready", "failed", 0)
    assert rows["bad"].reason == "exit status 3: the last line explains it"


def test_essential_child_that_cannot_start_ends_the_runtime(start: Start) -> None:
    """When an essential child fails at start, everything stops with status 78, and the launcher is told why."""
    tree = start(child("a"), child("bad", "cannot_start", essential=True))
    assert tree.started["error"]["message"] == "model.gguf is a directory"
    assert tree.process.wait(DEADLINE_S) == 78


def test_a_child_that_is_never_ready_is_failed(start: Start) -> None:
    """A start that takes longer than `ready_ms` is a failed one."""
    tree = start(child("slow", "never_ready", ready_ms=300))
    row = tree.rows()["slow"]
    assert row.state == "failed"
    assert row.error is not None
    assert row.error.code == "timeout"


def test_too_many_deaths_of_helpers_end_the_runtime(start: Start) -> None:
    """When helpers die more often than allowed, the supervisor stops everything and exits with status 1."""
    tree = start(
        child("a"), child("b", "exits_after_ready", boot={"status": 5}),
        sets=["supervisor.intensity=2", "supervisor.backoff_max_s=0"],
    )  # fmt: skip
    assert tree.process.wait(DEADLINE_S) == 1
    assert tree.everything_is_gone()
    outcomes = [e["outcome"] for e in tree.log() if e["event"] == "child.exited" and e["child"] == "b"]
    assert outcomes == ["restarting", "restarting", "gave_up"]


def test_too_many_deaths_of_a_model_fail_that_model(start: Start) -> None:
    """A model that dies again and again becomes failed with its reason; the rest serves, and it can be started anew."""
    tree = start(
        child("a"), model("model:m", "exits_after_ready", boot={"status": 5}),
        sets=["supervisor.model_intensity=1", "supervisor.intensity=0"],
    )  # fmt: skip
    row = tree.wait_row("model:m", lambda row: row.state == "failed", "is failed")
    assert row.reason == "exit status 5"
    assert row.error is not None
    assert (row.error.code, row.error.retryable) == ("model_down", False)
    assert tree.rows()["a"].state == "ready"
    tree.ask(StartChild(spec=model("model:m")))
    assert tree.rows()["model:m"].state == "ready"


def test_starting_a_child_answers_when_it_is_ready(start: Start) -> None:
    """`start_child` is answered when the child is ready; a second start of the same id is refused."""
    tree = start(child("a"))
    tree.ask(StartChild(spec=model("model:m")))
    assert is_ready(tree.rows()["model:m"])
    with pytest.raises(AlreadyLoaded, match="model:m is already there"):
        tree.ask(StartChild(spec=model("model:m")))


@pytest.mark.parametrize(
    ("module", "text"),
    [("cannot_start", "model.gguf is a directory"), ("dies_at_start", "exit status 3: the last line explains it")],
)
def test_starting_a_bad_model_answers_why(start: Start, module: str, text: str) -> None:
    """`start_child` of what cannot start is answered with the reason, and the child stays listed with it until stopped."""
    tree = start(child("a"))
    with pytest.raises(BadModel, match=text):
        tree.ask(StartChild(spec=model("model:m", module)))
    assert tree.rows()["model:m"].state == "failed"
    tree.ask(StopChild(id="model:m"))
    assert "model:m" not in tree.rows()


def test_load_progress_reaches_who_waits(start: Start) -> None:
    """What a starting child tells of its progress arrives as an event of the pending `start_child`."""
    tree = start()
    header = Header(protocol.VERSION, Kind.CALL, "start_child", "r1")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"ipc://{tree.dir}/supervisor")
        body = codec.encode(StartChild(spec=model("model:m", "loads_slowly")))
        dealer.send_multipart([b"", codec.encode(header), body])
        assert dealer.poll(DEADLINE_S * 1000)
        _, raw_header, event = dealer.recv_multipart()
        assert codec.decode_header(raw_header).kind is Kind.EVENT
        assert codec.decode(event, LoadProgress).fraction == 0.5
        assert dealer.poll(DEADLINE_S * 1000)
        assert codec.decode_header(dealer.recv_multipart()[1]).kind is Kind.DONE


def test_stopping_a_child_that_will_not_stop(start: Start) -> None:
    """A child that ignores SIGTERM is killed after `shutdown_ms`; `stop_child` is answered when it is gone."""
    tree = start(child("stubborn", "ignores_sigterm", shutdown_ms=200))
    pid = tree.rows()["stubborn"].pid
    tree.ask(StopChild(id="stubborn"))
    assert "stubborn" not in tree.rows()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(NotFound):
        tree.ask(StopChild(id="stubborn"))


def test_restart_on_request_is_no_death(start: Start) -> None:
    """`restart_child` gives a new process, is answered when that is ready, and counts against nothing."""
    tree = start(child("a"), sets=["supervisor.intensity=0"])
    before = tree.rows()["a"]
    tree.ask(RestartChild(id="a"))
    after = tree.rows()["a"]
    assert is_ready(after)
    assert after.pid != before.pid
    assert after.restarts == 0


def test_a_hung_helper_is_replaced(start: Start) -> None:
    """A child whose loop stands still is killed and replaced."""
    tree = start(child("stuck", "hangs"), sets=["supervisor.hang_s=3"])
    row = tree.wait_row("stuck", lambda row: row.restarts == 1, "is replaced")
    assert row.reason is not None
    assert row.reason.startswith("hung: no sign of life")


def test_a_model_in_an_endless_call_is_replaced(start: Start) -> None:
    """A model whose call outlasts its budget by more than the grace is replaced, although its loop turns."""
    tree = start(model("model:m", "call_outlasts"))
    row = tree.wait_row("model:m", lambda row: row.restarts > 0, "is replaced")
    assert row.reason == "hung: one call took 60000 ms, 1000 ms were allowed"


def test_killed_supervisor_leaves_no_orphan(start: Start) -> None:
    """After SIGKILL of the supervisor all children are gone within 2 s, and the next one starts in the same directories."""
    tree = start(child("a"), child("b"), child("stubborn", "ignores_sigterm"))
    tree.process.kill()
    tree.process.wait()
    assert tree.everything_is_gone(2.0)
    assert sorted(path.name for path in tree.dir.iterdir()) == ["a", "b", "stubborn", "supervisor"]
    again = start(child("a"))
    assert again.started["error"] is None
    assert sorted(path.name for path in again.dir.iterdir()) == ["a", "supervisor"]


def test_stop_leaves_nothing(start: Start) -> None:
    """SIGTERM stops in reverse order with status 0; processes that a child had started go too, and so does the directory."""
    tree = start(child("first"), child("second", "has_offspring"), child("third"))
    offspring = wait_for(
        lambda: [e["about"]["offspring"] for e in tree.log("first") if e.get("about", {}).get("offspring")], "told"
    )[0]
    assert tree.end() == 0
    stopped = [e["child"] for e in tree.log() if e["event"] == "child.exited"]
    assert stopped == ["third", "second", "first"]
    assert not tree.dir.exists()
    wait_for(lambda: not Path(f"/proc/{offspring}").exists(), "the child's own process is gone")


def test_stop_on_request_is_answered(start: Start) -> None:
    """`stop_tree` is answered when everything has stopped, and the supervisor exits with status 0."""
    tree = start(child("a"))
    pid = tree.rows()["a"].pid
    tree.ask(StopTree())
    assert not Path(f"/proc/{pid}").exists()
    assert tree.process.wait(DEADLINE_S) == 0


def test_tied_supervisor_ends_with_its_program(start: Start) -> None:
    """With `--tied`, the end of standard input stops the runtime in good order."""
    tree = start(child("a"), stdin=subprocess.PIPE)
    assert tree.process.stdin is not None
    tree.process.stdin.close()
    assert tree.process.wait(DEADLINE_S) == 0


def test_second_supervisor_is_refused(start: Start) -> None:
    """A second supervisor on the same directory says so and leaves the first alone."""
    tree = start(child("a"))
    second = start(child("a"))
    assert second.process.wait(DEADLINE_S) == 78
    assert "is in use by another runtime" in second.started["error"]["message"]
    assert is_ready(tree.rows()["a"])


def test_long_runtime_directory_is_refused(start: Start) -> None:
    """A directory whose socket paths the kernel would not take is refused with both numbers."""
    tree = start(child("a"), sets=[f"runtime.dir=/tmp/{'x' * 120}"])
    assert "bytes, the kernel allows 107" in tree.started["error"]["message"]
    assert not Path(f"/tmp/{'x' * 120}").exists()


def test_configuration_problems_are_told_to_the_launcher(start: Start) -> None:
    """A wrong configuration ends the supervisor with status 78 and all problems in its answer."""
    tree = start(child("a"), sets=["log.level=loud", "writer.processes=0"])
    assert tree.process.wait(DEADLINE_S) == 78
    assert tree.started["error"]["code"] == "invalid_argument"
    assert len(tree.started["error"]["details"]["problems"]) == 2


def test_bad_messages_do_not_hurt(start: Start) -> None:
    """Whatever is written to the supervisor's socket, it goes on, and an unknown call is answered with an error."""
    tree = start(child("a"))
    call = codec.encode(Header(protocol.VERSION, Kind.CALL, "no_such_verb", "r1"))
    stranger = codec.encode(Header(protocol.VERSION, Kind.CAST, "ready", ""))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"ipc://{tree.dir}/supervisor")
        for frames in ([b""], [b"x", b"y", b"z"], [b"", stranger, codec.encode(protocol.Ready(incarnation=1))]):
            dealer.send_multipart(frames)
        dealer.send_multipart([b"", call, b"\x80"])
        assert dealer.poll(DEADLINE_S * 1000)
        assert codec.decode_header(dealer.recv_multipart()[1]).kind is Kind.ERROR
    assert is_ready(tree.rows()["a"])


def test_systemd_is_told(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NOTIFY_SOCKET set, ready, the watchdog's turns and the stop are reported."""
    with (
        tempfile.TemporaryDirectory(prefix="bt-") as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
    ):
        manager.bind(f"{directory}/notify")
        manager.settimeout(DEADLINE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", f"{directory}/notify")
        monkeypatch.setenv("WATCHDOG_USEC", "4000000")
        tree = start(child("a"))
        tree.end()
        manager.setblocking(False)
        said: list[str] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                said += manager.recv(4096).decode().splitlines()
    assert said[0] == "WATCHDOG=1"
    assert said[1].startswith("EXTEND_TIMEOUT_USEC=")
    assert said.index("READY=1") < said.index("STOPPING=1")
