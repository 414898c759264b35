"""One-for-one supervision as arithmetic: events in, commands out."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barrel_inference.protocol import ChildRow, ChildSpec, Down, ErrorBody, Up
from barrel_inference.supervisor.restarts import Intensity
from barrel_inference.supervisor.steps import (
    Alive,
    AllReady,
    Answer,
    BecameReady,
    Boot,
    BootChanged,
    Command,
    Event,
    Exited,
    Finished,
    Kill,
    Refused,
    Report,
    Restart,
    Spawn,
    Spawned,
    Start,
    Stop,
    StopAll,
    Tell,
    Terminate,
    Tick,
)
from barrel_inference.supervisor.tree import Limits, Tree

KILLED = (-9, "signal SIGKILL")


class Bench:
    """A tree whose processes are made up: it remembers incarnations, and checks the tree after every event."""

    def __init__(self, *specs: ChildSpec, helpers: int = 3, models: int = 2, backoff_max_s: float = 5.0) -> None:
        self.now_s = 100.0
        limits = Limits(Intensity(helpers, 60.0), Intensity(models, 60.0), backoff_max_s, hang_s=10.0)
        self.tree = Tree(limits, first_incarnation=0, now_s=self.now_s)
        self.incarnations: dict[str, int] = {}
        self.booted = self.do(Boot(specs))

    def do(self, event: Event, *, after_s: float = 0.0) -> list[Command]:
        """Handle one event, and what spawning causes."""
        self.now_s += after_s
        commands = self.tree.handle(event, self.now_s)
        for command in commands:
            if isinstance(command, Spawn):
                self.incarnations[command.spec.id] = command.incarnation
                self.tree.handle(Spawned(command.spec.id, command.incarnation, 1000 + command.incarnation), self.now_s)
        self.tree.check()
        return commands

    def ready(self, *ids: str) -> list[Command]:
        """These become ready."""
        return [c for child_id in ids for c in self.do(BecameReady(child_id, self.incarnations[child_id]))]

    def dies(self, child_id: str, status: int | None = -9, reason: str = "signal SIGKILL") -> list[Command]:
        """Its process ends."""
        return self.do(Exited(child_id, self.incarnations[child_id], status, reason))

    def wait(self, seconds: float) -> list[Command]:
        """Time passes with a turn a second, everyone sending beats."""
        commands: list[Command] = []
        for _ in range(int(seconds)):
            for child_id, incarnation in self.incarnations.items():
                commands += self.do(Alive(child_id, incarnation))
            commands += self.do(Tick(), after_s=1.0)
        return commands

    def row(self, child_id: str) -> ChildRow:
        """Its row."""
        return next(row for row in self.tree.rows(self.now_s) if row.id == child_id)


def helper(child_id: str, **fields: Any) -> ChildSpec:
    """A helper; its module is its own unless said otherwise."""
    return ChildSpec(id=child_id, **{"module": f"m.{child_id}", **fields})


def model(child_id: str = "model:m", **fields: Any) -> ChildSpec:
    """A model."""
    return ChildSpec(id=child_id, **{"module": "m.model", "group": "model", "restart": "transient", **fields})


def of(kind: type[Any], commands: list[Command]) -> list[Any]:
    """The commands of one kind."""
    return [command for command in commands if isinstance(command, kind)]


def test_boot_starts_all_at_once_and_reports_ready_once() -> None:
    """All children are started without waiting for each other; ready is said when the last one is."""
    bench = Bench(helper("a"), helper("b"))
    assert [spawn.spec.id for spawn in of(Spawn, bench.booted)] == ["a", "b"]
    assert of(AllReady, bench.ready("a")) == []
    assert of(AllReady, bench.ready("b")) == [AllReady()]
    bench.dies("a")
    bench.wait(1)
    assert of(AllReady, bench.ready("a")) == []


def test_changed_boot_is_the_next_incarnations() -> None:
    """What a child wants its successor to start with, that starts with; a dead incarnation has no say."""
    bench = Bench(model())
    bench.ready("model:m")
    first = bench.incarnations["model:m"]
    assert of(Answer, bench.do(BootChanged("model:m", first, {"adapters": [1]}, call=7))) == [Answer(7, None)]
    bench.dies("model:m")
    spawned = of(Spawn, bench.wait(2))
    assert [spawn.spec.boot for spawn in spawned] == [{"adapters": [1]}]
    bench.do(BootChanged("model:m", first, {}, call=8))
    bench.ready("model:m")
    bench.dies("model:m")
    assert [spawn.spec.boot for spawn in of(Spawn, bench.wait(20))] == [{"adapters": [1]}]


def test_up_goes_both_ways() -> None:
    """Who becomes ready is told of all ready ones, and they of it."""
    bench = Bench(helper("a"), helper("b"), helper("c"))
    bench.ready("a", "b")
    tells = of(Tell, bench.ready("c"))
    assert [(tell.to, tell.message.id) for tell in tells] == [(("c",), "a"), (("c",), "b"), (("a", "b"), "c")]
    assert all(isinstance(tell.message, Up) for tell in tells)


def test_one_for_one() -> None:
    """The one that died is started again after a short delay; siblings are told and left alone."""
    bench = Bench(helper("a"), helper("b"))
    bench.ready("a", "b")
    commands = bench.dies("b")
    assert of(Tell, commands) == [
        Tell(("a",), Down(id="b", incarnation=2, reason="signal SIGKILL", restarting=True))
    ]  # fmt: skip
    assert of(Report, commands)[0].outcome == "restarting"
    assert bench.tree.next_due_s() == pytest.approx(bench.now_s + 0.05)
    assert [spawn.spec.id for spawn in of(Spawn, bench.do(Tick(), after_s=0.05))] == ["b"]


def test_delay_doubles() -> None:
    """Each further death in the window doubles the delay, up to the limit."""
    bench = Bench(helper("a"), helpers=100, backoff_max_s=0.3)
    bench.ready("a")
    delays = []
    for _ in range(5):
        delays.append(of(Report, bench.dies("a"))[0].delay_s)
        bench.do(Tick(), after_s=1.0)
        bench.ready("a")
    assert delays == pytest.approx([0.05, 0.1, 0.2, 0.3, 0.3])


def test_death_before_ever_ready_is_final_and_burns_nothing() -> None:
    """It becomes failed with its reason, whoever waits is told, and no restart is counted."""
    bench = Bench(helper("a"), helpers=0)
    bench.ready("a")
    bench.do(Start(model(), call=7))
    commands = bench.dies("model:m", -11, "signal SIGSEGV")
    answer = of(Answer, commands)[0]
    assert (answer.call, answer.error.code) == (7, "bad_model")
    assert "signal SIGSEGV" in answer.error.message
    assert bench.row("model:m").state == "failed"
    assert bench.row("model:m").restarts == 0


def test_refusal_is_final_even_after_service() -> None:
    """A child that says that it can never start is failed with its own error, also when it had served before."""
    bench = Bench(model())
    bench.ready("model:m")
    bench.dies("model:m")
    bench.do(Tick(), after_s=1.0)
    error = ErrorBody(code="bad_model", message="file is gone")
    bench.do(Refused("model:m", bench.incarnations["model:m"], error))
    bench.dies("model:m", 78, "exit status 78")
    assert (bench.row("model:m").state, bench.row("model:m").error) == ("failed", error)


def test_death_during_a_restart_counts() -> None:
    """A child that has served and dies before it is ready again is one more death, not a failed start."""
    bench = Bench(model(), models=2)
    bench.ready("model:m")
    for expected in ("backoff", "backoff", "failed"):
        bench.dies("model:m")
        assert bench.row("model:m").state == expected
        bench.do(Tick(), after_s=1.0)


def test_helpers_share_one_limit() -> None:
    """Deaths of all helpers count together; over the limit everything is stopped, with a status that says so."""
    bench = Bench(helper("a"), helper("b"), helper("c"), helpers=2)
    bench.ready("a", "b", "c")
    bench.dies("a")
    bench.dies("b")
    commands = bench.dies("c")
    assert of(Report, commands)[0].outcome == "gave_up"
    finished = of(Finished, commands)[0]  # the others were between two lives
    assert finished.status == 1
    assert "c and other processes died more than 2 times in 60 s of service" in finished.reason


def test_giving_up_stops_those_that_live() -> None:
    """Who still lives when the limit is exceeded is stopped before the end."""
    bench = Bench(helper("a"), helper("b"), helpers=0)
    bench.ready("a", "b")
    assert of(Terminate, bench.dies("b")) == [Terminate("a")]
    assert of(Finished, bench.dies("a", 0, "exit status 0"))[0].status == 1


def test_models_have_their_own_limit() -> None:
    """A model over its limit is failed alone, with its reason; its deaths do not count for helpers, nor theirs for it."""
    bench = Bench(helper("a"), model(), helpers=0, models=2)
    bench.ready("a", "model:m")
    for _ in range(2):
        bench.dies("model:m")
        bench.do(Tick(), after_s=1.0)
        bench.ready("model:m")
    commands = bench.dies("model:m")
    assert of(Tell, commands)[0].message.restarting is False
    row = bench.row("model:m")
    assert row.error is not None
    assert (row.state, row.error.code, row.error.retryable) == ("failed", "model_down", False)
    assert bench.row("a").state == "ready"


def test_only_served_time_moves_the_window() -> None:
    """A model that loads for longer than the period and dies at once is failed all the same."""
    bench = Bench(model(), models=2)
    bench.ready("model:m")
    for _ in range(3):
        bench.dies("model:m")
        bench.wait(300)
        if bench.row("model:m").state == "starting":
            bench.ready("model:m")
    assert bench.row("model:m").state == "failed"


def test_service_is_forgiven() -> None:
    """Deaths further back than the period of service do not count."""
    bench = Bench(model(), models=1)
    bench.ready("model:m")
    for _ in range(4):
        bench.wait(61)
        bench.dies("model:m")
        bench.do(Tick(), after_s=1.0)
        bench.ready("model:m")
    assert bench.row("model:m").state == "ready"
    assert bench.row("model:m").restarts == 4


@pytest.mark.parametrize(
    ("restart", "status", "outcome"),
    [
        ("permanent", 0, "restarting"), ("permanent", 1, "restarting"), ("transient", 0, "stopped"),
        ("transient", 1, "restarting"), ("temporary", 0, "stopped"), ("temporary", -9, "stopped"),
    ],
)  # fmt: skip
def test_restart_types(restart: str, status: int, outcome: str) -> None:
    """Permanent children always come back, transient ones after a failure, temporary ones never."""
    bench = Bench(helper("a"), helper("b", restart=restart))
    bench.ready("a", "b")
    assert of(Report, bench.dies("b", status, "it ended"))[0].outcome == outcome


def test_stop_forgets_after_the_process_is_gone() -> None:
    """The caller is answered when the process is reaped; until SIGKILL it has `shutdown_ms`."""
    bench = Bench(helper("a"), model(shutdown_ms=3000))
    bench.ready("a", "model:m")
    commands = bench.do(Stop("model:m", call=1))
    assert commands == [Terminate("model:m")]
    assert of(Kill, bench.do(Tick(), after_s=2.9)) == []
    assert of(Kill, bench.do(Tick(), after_s=0.2)) == [Kill("model:m")]
    commands = bench.dies("model:m")
    assert of(Tell, commands)[0].message.restarting is False
    assert of(Answer, commands) == [Answer(1)]
    assert [row.id for row in bench.tree.rows(bench.now_s)] == ["a"]


def test_stop_of_a_starting_child_answers_both_callers() -> None:
    """Who waits for a start that is called off gets an error; who called it off is answered at the end."""
    bench = Bench()
    bench.do(Start(model(), call=1))
    commands = bench.do(Stop("model:m", call=2))
    assert [(answer.call, answer.error.code) for answer in of(Answer, commands)] == [(1, "model_down")]
    assert of(Answer, bench.dies("model:m", -15, "signal SIGTERM")) == [Answer(2)]


def test_stop_between_two_lives() -> None:
    """A child that waits for its restart is forgotten at once, and peers learn that nobody comes back."""
    bench = Bench(helper("a"), model())
    bench.ready("a", "model:m")
    bench.dies("model:m")
    commands = bench.do(Stop("model:m", call=1))
    assert [(tell.message.id, tell.message.restarting) for tell in of(Tell, commands)] == [("model:m", False)]
    assert of(Answer, commands) == [Answer(1)]


def test_restart_on_request_counts_as_no_death() -> None:
    """A restart that was asked for is answered when ready and never leads to giving up."""
    bench = Bench(helper("a"), helpers=0)
    bench.ready("a")
    for call in range(5):
        assert of(Terminate, bench.do(Restart("a", call))) == [Terminate("a")]
        assert of(Spawn, bench.dies("a", 0, "exit status 0"))
        assert of(Answer, bench.ready("a")) == [Answer(call)]
    assert bench.row("a").restarts == 0


def test_a_failed_child_can_be_started_or_restarted() -> None:
    """`Start` replaces a failed child of the same id; `Restart` gives it another chance with the same specification."""
    bench = Bench(helper("a"), model())
    bench.ready("a")
    bench.dies("model:m")
    assert of(Spawn, bench.do(Start(model(), call=1)))
    bench.dies("model:m")
    assert of(Spawn, bench.do(Restart("model:m", call=2)))
    assert of(Answer, bench.ready("model:m")) == [Answer(2)]


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (Start(helper("a"), call=1), "already_loaded"), (Start(helper("a/b"), call=1), "invalid_argument"),
        (Stop("x", call=1), "not_found"), (Restart("x", call=1), "not_found"),
    ],
)  # fmt: skip
def test_refused_requests(event: Event, code: str) -> None:
    """What cannot be done is answered with a typed error."""
    bench = Bench(helper("a"))
    assert [answer.error.code for answer in of(Answer, bench.do(event))] == [code]


def test_stop_order_is_reverse_in_waves() -> None:
    """Children stop in reverse start order; neighbours of one module together; nobody is started again meanwhile."""
    bench = Bench(
        helper("router"), helper("w0", module="w"), helper("w1", module="w"), model("model:a"), model("model:b")
    )
    bench.ready("router", "w0", "w1", "model:a", "model:b")
    assert bench.do(StopAll()) == [Terminate("model:b"), Terminate("model:a")]
    assert of(Terminate, bench.dies("model:a", 0, "")) == []
    assert of(Report, bench.dies("router"))[0].outcome == "stopped"
    assert of(Terminate, bench.dies("model:b", 0, "")) == [Terminate("w1"), Terminate("w0")]
    bench.dies("w0", 0, "")
    assert of(Finished, bench.dies("w1", 0, "")) == [Finished(0, "stopped")]


def test_stop_drops_who_waits_for_a_restart() -> None:
    """A child between two lives has nothing to stop."""
    bench = Bench(helper("a"), helper("b"))
    bench.ready("a", "b")
    bench.dies("b")
    assert of(Terminate, bench.do(StopAll())) == [Terminate("a")]
    assert of(Finished, bench.dies("a", 0, "")) == [Finished(0, "stopped")]


def test_stop_at_once() -> None:
    """Told twice, it kills."""
    bench = Bench(helper("a"), helper("b"))
    bench.ready("a", "b")
    bench.do(StopAll())
    assert of(Kill, bench.do(StopAll(at_once=True))) == [Kill("a"), Kill("b")]


def test_essential_child_takes_the_tree_along() -> None:
    """When an essential child is failed, the rest is stopped and its error is the reason."""
    bench = Bench(helper("a"), helper("b", essential=True))
    bench.ready("a")
    assert of(Terminate, bench.dies("b")) == [Terminate("a")]
    finished = of(Finished, bench.dies("a", 0, ""))[0]
    assert finished.status == 78
    assert "b ended before it was ready" in finished.error.message


def test_silence_is_a_hang() -> None:
    """A helper without a beat for `hang_s` is killed, and its death counts; a model gets three times that."""
    bench = Bench(helper("a"), model())
    bench.ready("a", "model:m")
    kills: dict[str, float] = {}
    started_s = bench.now_s
    for _ in range(40):
        for kill in of(Kill, bench.do(Tick(), after_s=1.0)):
            kills[kill.id] = bench.now_s - started_s
    assert kills == {"a": 10.0, "model:m": 30.0}
    bench.dies("a")
    assert (bench.row("a").state, bench.row("a").reason) == ("backoff", "hung: no sign of life for 10.0 s")


def test_own_absence_is_nobodys_hang() -> None:
    """After a long pause of the supervisor itself the beats still lie unread: nobody is killed for it."""
    bench = Bench(helper("a"))
    bench.ready("a")
    assert of(Kill, bench.do(Tick(), after_s=3600.0)) == []


def test_own_absence_counts_for_no_deadline() -> None:
    """Who was loading, stopping or waiting for its restart when everything stood still has the rest of its time afterwards."""
    bench = Bench(helper("loads", ready_ms=30_000), helper("stops"), helper("died"))
    bench.ready("stops", "died")
    bench.dies("died")
    bench.do(Stop("stops"))
    assert bench.do(Tick(), after_s=3600.0) == []
    assert [c.spec.id for c in of(Spawn, bench.do(Tick(), after_s=2.0))] == ["died"]
    assert of(Kill, bench.do(Tick(), after_s=2.9)) == []
    assert [kill.id for _ in range(13) for kill in of(Kill, bench.do(Tick(), after_s=2.0))] == ["stops", "loads"]


@pytest.mark.parametrize(
    ("age_ms", "budget_ms", "is_hung"), [(11_000, 1_000, False), (11_001, 1_000, True), (999_999, 0, False)]
)
def test_a_call_that_outlasts_its_budget(age_ms: int, budget_ms: int, is_hung: bool) -> None:
    """A model is replaced when one call takes 10 s more than its budget; without a budget it may take for ever."""
    bench = Bench(model())
    bench.ready("model:m")
    commands = bench.do(Alive("model:m", bench.incarnations["model:m"], age_ms, budget_ms))
    assert of(Kill, commands) == ([Kill("model:m")] if is_hung else [])


def test_not_ready_in_time() -> None:
    """A first start that takes too long is killed and failed; without a limit it may take for ever."""
    bench = Bench(helper("a", ready_ms=500), helper("b", ready_ms=0))
    assert of(Kill, bench.do(Tick(), after_s=0.5)) == [Kill("a")]
    bench.dies("a")
    row = bench.row("a")
    assert row.error is not None
    assert (row.state, row.error.code) == ("failed", "timeout")
    assert of(Kill, bench.wait(1000)) == []


def test_messages_of_a_dead_incarnation_change_nothing() -> None:
    """Ready, beats and exits that belong to an earlier process are dropped."""
    bench = Bench(helper("a"))
    bench.ready("a")
    old = bench.incarnations["a"]
    bench.dies("a")
    bench.do(Tick(), after_s=1.0)
    for event in (BecameReady("a", old), Exited("a", old, *KILLED), Alive("a", old, 99_999, 1)):
        assert bench.do(event) == []
    assert bench.row("a").state == "starting"


def test_a_process_that_cannot_be_made() -> None:
    """When the system refuses a process, the child is failed with that reason."""
    bench = Bench(helper("a"))
    bench.dies("a", None, "could not be started: no memory")
    assert bench.row("a").reason == "could not be started: no memory"


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["ready", "die", "stop", "restart", "start", "tick", "refuse"]), st.integers(0, 3)),
    max_size=60,
)


def _events(bench: Bench, action: str, child_id: str) -> Iterator[Event]:
    incarnation = bench.incarnations.get(child_id, 0)
    match action:
        case "ready":
            yield BecameReady(child_id, incarnation)
        case "die":
            yield Exited(child_id, incarnation, *KILLED)
        case "stop":
            yield Stop(child_id, call=next(CALLS))
        case "restart":
            yield Restart(child_id, call=next(CALLS))
        case "start":
            yield Start(model(child_id), call=next(CALLS))
        case "refuse":
            yield Refused(child_id, incarnation, ErrorBody(code="bad_model", message="no"))
            yield Exited(child_id, incarnation, 78, "exit status 78")


def _numbers() -> Iterator[int]:
    number = 0
    while True:
        yield (number := number + 1)


CALLS = _numbers()


@given(ACTIONS)
def test_any_sequence_ends_well(actions: list[tuple[str, int]]) -> None:
    """After any sequence of events the invariants hold, every call is answered exactly once, and a stop ends with no process."""
    ids = ["a", "b", "model:m", "model:n"]
    bench = Bench(helper("a"), helper("b"), helpers=1000)
    asked: list[int] = []
    answered: list[int] = []
    for action, number in actions:
        for event in [Tick()] if action == "tick" else _events(bench, action, ids[number]):
            asked += [event.call] if isinstance(event, Start | Stop | Restart) and event.call is not None else []
            answered += [answer.call for answer in of(Answer, bench.do(event, after_s=0.5))]
    commands = bench.do(StopAll())
    for _ in ids:
        for child_id in ids:
            commands += bench.dies(child_id) if child_id in bench.incarnations else []
    answered += [answer.call for answer in of(Answer, commands)]
    assert sorted(answered) == sorted(asked)
    assert of(Finished, commands)
    assert bench.tree.rows(bench.now_s) == []
