"""What the router knows of models and requests (workers/registry.py)."""

from collections.abc import Iterator

import pytest

from barrel_inference.errors import ModelDown, ModelFailed, NotFound
from barrel_inference.protocol import ChildRow, Down, ModelRow, Phase
from barrel_inference.workers.registry import Limits, Pending, PendingTable, Registry, model_of, target_of


def row(phase: Phase = Phase.IDLE, *, incarnation: int = 1, model_id: str = "tiny") -> ModelRow:
    return ModelRow(
        model_id=model_id, incarnation=incarnation, backend="stub", phase=phase, pending_len=2, running=1,
        last_cache_hit=None, context_size=64, quant_type="f16", quant_bits=16, fingerprint=b"", tier="ram", n_seq_max=1,
        available_seqs=1, pinned_idle_seqs=0, memory_bytes={}, loaded_at=1.0,
    )  # fmt: skip


def down(*, restarting: bool, incarnation: int = 1) -> Down:
    return Down(id="model:tiny", incarnation=incarnation, reason="signal SIGKILL", restarting=restarting)


def child(state: str, *, restarts: int = 0, reason: str | None = None) -> ChildRow:
    return ChildRow(id="model:tiny", group="model", state=state, incarnation=3, restarts=restarts, reason=reason)


@pytest.fixture
def loaded() -> Registry:
    """A registry with one model that serves."""
    registry = Registry()
    registry.load_began("tiny", backend="stub", context_size=64, tier="ram")
    registry.up("tiny", 1)
    registry.row_came(row())
    registry.load_ended("tiny")
    return registry


def test_names() -> None:
    """A model's process is named after it, and only a model's process names a model."""
    assert (target_of("tiny"), model_of("model:tiny"), model_of("index")) == ("model:tiny", "tiny", None)


def test_loading_then_idle() -> None:
    """A model is seen while it loads, and counts as idle once it serves, also before its first row of its own."""
    registry = Registry()
    registry.load_began("tiny", backend="stub", context_size=64, tier="ram")
    assert (registry.row("tiny").phase, registry.is_taken("tiny")) == (Phase.LOADING, True)
    registry.up("tiny", 1)
    registry.load_ended("tiny")
    assert registry.row("tiny").phase is Phase.IDLE


@pytest.mark.parametrize(("restarting", "phase"), [(True, Phase.RESTARTING), (False, Phase.FAILED)])
def test_down_is_told_truthfully(loaded: Registry, restarting: bool, phase: Phase) -> None:
    """A dead model is restarting or failed, with the reason, and nothing runs or waits in it."""
    loaded.down(down(restarting=restarting))
    seen = loaded.row("tiny")
    assert (seen.phase, seen.reason, seen.running, seen.pending_len, seen.restarts) == (
        phase, "signal SIGKILL", 0, 0, int(restarting),
    )  # fmt: skip


def test_message_of_the_dead_is_dropped(loaded: Registry) -> None:
    """A row of an incarnation that was declared down changes nothing; the next incarnation's does."""
    loaded.down(down(restarting=True))
    assert not loaded.row_came(row(Phase.GENERATING))
    assert loaded.row("tiny").phase is Phase.RESTARTING
    assert loaded.row_came(row(Phase.IDLE, incarnation=2))
    assert loaded.row("tiny").phase is Phase.IDLE


def test_late_down_does_not_hide_the_next_incarnation(loaded: Registry) -> None:
    """When the new incarnation's row comes before the old one's death, the row stays."""
    loaded.row_came(row(Phase.IDLE, incarnation=2))
    loaded.down(down(restarting=True))
    assert loaded.row("tiny").phase is Phase.IDLE


def test_loading_again_is_restarting(loaded: Registry) -> None:
    """A restarted model that loads is seen as restarting, not as loading for the first time."""
    loaded.down(down(restarting=True))
    loaded.row_came(row(Phase.LOADING, incarnation=2))
    assert loaded.row("tiny").phase is Phase.RESTARTING


def test_unload_frees_the_id(loaded: Registry) -> None:
    """While it is unloaded a model takes no requests; after it the id is free, and late rows do not bring it back."""
    loaded.unload_began("tiny")
    assert loaded.is_leaving("tiny")
    assert isinstance(loaded.refusal("tiny"), NotFound)
    loaded.down(down(restarting=False))
    assert loaded.row("tiny").phase is Phase.IDLE  # it did not fail
    loaded.forget("tiny")
    assert not loaded.is_known("tiny")
    assert not loaded.row_came(row())
    assert loaded.rows() == []


def test_refusals(loaded: Registry) -> None:
    """Unknown: not found. Restarting: down, to be retried. Failed: down for good. None of them was ever handed over."""
    assert isinstance(loaded.refusal("other"), NotFound)
    loaded.down(down(restarting=True))
    again = loaded.refusal("tiny")
    assert isinstance(again, ModelDown)
    assert (again.retryable, again.details["accepted"]) == (True, False)
    loaded.learn([child("failed", reason="no file")])
    never = loaded.refusal("tiny")
    assert isinstance(never, ModelFailed)
    assert not never.retryable
    assert "no file" in never.message
    assert not loaded.is_taken("tiny")


@pytest.mark.parametrize(
    ("state", "restarts", "phase"),
    [
        ("ready", 0, Phase.IDLE),
        ("starting", 0, Phase.LOADING),
        ("starting", 1, Phase.RESTARTING),
        ("backoff", 1, Phase.RESTARTING),
        ("failed", 2, Phase.FAILED),
    ],
)
def test_learned_from_the_supervisor(state: str, restarts: int, phase: Phase) -> None:
    """A router that was restarted learns of the models from the supervisor."""
    registry = Registry()
    registry.learn([child(state, restarts=restarts)])
    assert (registry.row("tiny").phase, registry.row("tiny").restarts) == (phase, restarts)


def test_a_restart_that_came_to_nothing(loaded: Registry) -> None:
    """That a restarting model failed, or was stopped meanwhile, is learned from the supervisor's rows."""
    loaded.down(down(restarting=True))
    assert loaded.is_waiting()
    loaded.learn([child("failed", restarts=1, reason="the file is gone")])
    assert (loaded.row("tiny").phase, loaded.row("tiny").reason) == (Phase.FAILED, "the file is gone")
    assert not loaded.is_waiting()
    other = Registry()
    other.learn([child("backoff", restarts=1)])
    other.learn([])
    assert other.rows() == []


def test_computing_models(loaded: Registry) -> None:
    """Only models that prefill or generate share the threads."""
    assert loaded.computing_models() == 0
    loaded.row_came(row(Phase.PREFILLING))
    loaded.row_came(row(Phase.GENERATING, model_id="other"))
    loaded.row_came(row(Phase.IDLE, model_id="third"))
    assert loaded.computing_models() == 2


def test_generated_ids_are_free(loaded: Registry) -> None:
    """A generated id is never one that is taken."""
    loaded.load_began("barrel_inference_model_1", backend="stub", context_size=1, tier="ram")
    assert loaded.new_id(1) == "barrel_inference_model_2"


LIMITS = Limits(max_requests_per_client=2, max_requests=3)


@pytest.fixture
def table() -> Iterator[PendingTable]:
    """An empty table; its invariants are checked at the end."""
    made = PendingTable()
    yield made
    made.check()


def test_pending_until_answered(table: PendingTable) -> None:
    """A call is pending from when it is handed over until it has its answer; answers may come twice."""
    table.add(Pending(b"c", "1", "model:tiny"))
    assert table.holds(b"c", "1")
    table.remove(b"c", "1")
    table.remove(b"c", "1")
    assert not table.holds(b"c", "1")
    assert len(table) == 0


def test_limits(table: PendingTable) -> None:
    """The limit of a client, and the one of all, refuse with their number; a repeated id takes its own place."""
    table.add(Pending(b"a", "1", "model:tiny"))
    table.add(Pending(b"a", "2", "model:tiny"))
    refusal = table.refusal(b"a", "3", LIMITS)
    assert refusal is not None
    assert "max_requests_per_client is 2" in str(refusal)
    assert table.refusal(b"a", "2", LIMITS) is None
    table.add(Pending(b"a", "2", "model:tiny"))
    assert len(table) == 2
    table.add(Pending(b"b", "1", "model:tiny"))
    refusal = table.refusal(b"b", "2", LIMITS)
    assert refusal is not None
    assert "max_requests is 3" in str(refusal)
    assert table.refusal(b"b", "2", Limits(2, 4)) is None  # they were raised meanwhile


def test_taking_what_a_death_leaves(table: PendingTable) -> None:
    """A dead process's calls are taken from all clients, a vanished client's from all processes."""
    table.add(Pending(b"a", "1", "model:tiny"))
    table.add(Pending(b"a", "2", "index"))
    table.add(Pending(b"b", "1", "model:tiny"))
    assert {(p.client, p.request_id) for p in table.take_target("model:tiny")} == {(b"a", "1"), (b"b", "1")}
    assert [p.target for p in table.take_client(b"a")] == ["index"]
    assert len(table) == 0


def test_find_by_request_id(table: PendingTable) -> None:
    """A cancel names a request id alone; every call of its tenant with it is found, and no other's."""
    table.add(Pending(b"a", "same", "model:tiny"))
    table.add(Pending(b"b", "same", "model:other"))
    table.add(Pending(b"c", "same", "model:tiny", tenant="alice"))
    assert {pending.target for pending in table.find("same", "")} == {"model:tiny", "model:other"}
    assert [pending.client for pending in table.find("same", "alice")] == [b"c"]
    assert table.find("unknown", "") == table.find("same", "bob") == []
