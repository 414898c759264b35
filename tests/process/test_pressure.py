"""The pressure poller in a real runtime: what one check evicts and unloads, and what it says when it cannot."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from barrel_inference import Client, InvalidArgument, NoSession, NotFound, NotSupported, Runtime, config
from barrel_inference.protocol import PressureCommand, PressureReply, Reconfigured
from barrel_inference.results import StreamEvent
from tests.process import caching
from tests.process.harness import Caller, Tree
from tests.process.killing import wait_for

# Answers from a file of the test: fixed figures, or the bytes of the RAM tier, or so much per model, asked of the runtime itself.
SOURCE = """
import json, os
from barrel_inference import Client

def sample():
    with open(os.environ["BARREL_TEST_READING"]) as file:
        said = json.load(file)
    used = said["used"]
    if "endpoint" in said:
        with Client(said["endpoint"], timeout_s=5) as client:
            if "per_model" in said:
                used += said["per_model"] * len(client.models())
            else:
                used += sum(tier.stored_bytes for tier in client.cache.stats().tiers if tier.kind == "ram")
    return used, said["total"]
"""
NAME = "module:source_of_the_test"
CONFIG: dict[str, Any] = caching.CONFIG | {
    "tiers": {"ram": {"quota_bytes": "64MiB"}, "ram_file": {"quota_bytes": "64MiB"}, "disk": {"enabled": False}},
    "pressure": {"min_evict_bytes": 0, "interval_ms": 50, "unload_models_under_pressure": False},
}
PAGE_WORDS = 300


class World:
    """A runtime whose poller reads what the test says."""

    def __init__(self, runtime: Runtime, client: Client, file: Path) -> None:
        self.runtime = runtime
        self.client = client
        self._file = file

    def read(self, used: int, total: int) -> None:
        """The source says this from now on."""
        self._write({"used": used, "total": total})

    def follow_ram(self, total: int) -> None:
        """The source tells the bytes of the RAM tier from now on."""
        self._write({"used": 0, "total": total, "endpoint": self.runtime.endpoint})

    def follow_models(self, per_model: int, total: int) -> None:
        """The source tells so much per loaded model from now on."""
        self._write({"used": 0, "total": total, "endpoint": self.runtime.endpoint, "per_model": per_model})

    def _write(self, said: dict[str, Any]) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(said))
        fresh.rename(self._file)

    def ram_bytes(self) -> int:
        """What the RAM tier holds."""
        return sum(tier.stored_bytes for tier in self.client.cache.stats().tiers if tier.kind == "ram")

    def fill(self, prompts: int) -> None:
        """Save prompts without a common head in the RAM tier."""
        model = caching.load(self.client)
        for number in range(prompts):
            caching.ask(self.client, model, [number + 1, *range(1, PAGE_WORDS)], tokens=1)
        self.client.unload(model)


def made(folder: Path, pressure: dict[str, Any]) -> Iterator[World]:
    """A runtime with the test's source."""
    (folder / "source_of_the_test.py").write_text(SOURCE)
    reading = folder / "reading.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.setenv("BARREL_TEST_READING", str(reading))
        reading.write_text(json.dumps({"used": 0, "total": 100}))
        with Runtime(CONFIG | {"pressure": CONFIG["pressure"] | pressure}) as runtime, runtime.client() as client:
            yield World(runtime, client, reading)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A runtime that may not unload; the poller is off."""
    yield from made(tmp_path_factory.mktemp("pressure"), {"pressure_source": NAME})


@pytest.fixture
def unloading(tmp_path: Path) -> Iterator[World]:
    """A runtime that may unload and has no tier to evict from; the poller is off."""
    yield from made(tmp_path, {"pressure_source": NAME, "unload_models_under_pressure": True, "evict_tiers": []})


@pytest.fixture(autouse=True)
def _as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test finds the source, the thresholds and the switch of the configuration."""
    yield
    if "world" in request.fixturenames:
        pressure = request.getfixturevalue("world").client.pressure
        pressure.enable(False)
        pressure.set_source(NAME)
        pressure.set_thresholds(0.85, 0.75)


def test_status_before_anything(world: World) -> None:
    """The settings are told; nothing was read or done."""
    status = world.client.pressure.status()
    assert (status.enabled, status.source, status.high_watermark, status.low_watermark) == (False, NAME, 0.85, 0.75)
    assert (status.last_result, status.models_unloaded_total) == (None, 0)
    assert world.client.status()["pressure"] == status


def test_a_sample_has_no_consequences(world: World) -> None:
    """42 of 100 is 0.42, and stays the last reading; 99 of 100 evicts nothing."""
    world.fill(2)
    before = world.ram_bytes()
    world.read(42, 100)
    assert world.client.pressure.sample().ratio == 0.42
    assert world.client.pressure.status().used_bytes == 42
    world.read(99, 100)
    assert world.client.pressure.sample().ratio == 0.99
    assert world.ram_bytes() == before > 0


def test_one_check_ends_below_low(world: World) -> None:
    """With the RAM tier at 0.95 of a budget, one check leaves it at or below 0.75, and not empty."""
    world.fill(20)
    before = world.ram_bytes()
    budget = int(before / 0.95)
    world.follow_ram(budget)
    status = world.client.pressure.check()
    assert status.last_result == "relieved"
    assert status.ratio <= 0.75
    assert 0 < world.ram_bytes() == status.used_bytes <= 0.75 * budget
    assert status.evicted_bytes_total >= before - world.ram_bytes()
    assert world.client.pressure.check().last_result == "below_high"


def test_eviction_in_vain_ends(world: World) -> None:
    """A reading that does not move ends the pass after two steps; the rest of the cache stays."""
    world.fill(20)
    before = world.ram_bytes()
    # Each step asks for an eighth of what is stored.
    total = before
    world.read(int(total * 0.875), total)
    status = world.client.pressure.check()
    assert status.last_result == "no_effect"
    assert 0 < world.ram_bytes() < before


def test_nothing_to_evict_is_said(world: World) -> None:
    """An empty cache exhausts the pass."""
    world.client.cache.gc()
    world.read(99, 100)
    assert world.client.pressure.check().last_result == "exhausted"


def test_the_switch(world: World) -> None:
    """Switched on, the poller acts by itself; switched off, it does not read any more."""
    world.fill(10)
    before = world.ram_bytes()
    world.follow_ram(int(before / 0.95))
    assert world.client.pressure.enable(True).enabled
    wait_for(lambda: world.ram_bytes() <= 0.75 * before / 0.95, "the poller has evicted")
    assert not world.client.pressure.enable(False).enabled
    world.client.pressure.check()  # waits for a pass under way
    world.read(1, 100)
    assert world.client.pressure.status().used_bytes != 1


def test_a_reload_is_taken_up() -> None:
    """A changed `[pressure]` holds at once; what was set at run time holds until then."""

    def settings(**pressure: object) -> dict[str, Any]:
        tables = {"pressure": {"pressure_source": "noop", "interval_ms": 10, **pressure}}
        return config.dump(config.settings_from(config.lay_over(tables)))

    tree = Tree(settings())
    try:
        tree.start("barrel_inference.workers.pressure", "pressure")
        client = Caller(tree, "client")

        def ask(command: str, high: float | None = None, low: float | None = None) -> dict[str, Any]:
            message = PressureCommand(command=command, high=high, low=low)
            return client.call("pressure", message, PressureReply).status

        ask("set_thresholds", 0.5, 0.4)
        tree.tell("pressure", Reconfigured(settings=settings()))
        assert ask("status")["high_watermark"] == 0.5
        tree.tell("pressure", Reconfigured(settings=settings(enabled=True, high_watermark=0.9)))
        tree.until(lambda: ask("status")["last_result"] == "below_high")
        status = ask("status")
        assert (status["enabled"], status["high_watermark"], status["low_watermark"]) == (True, 0.9, 0.75)
    finally:
        tree.close()


def test_wrong_commands_change_nothing(world: World) -> None:
    """A refusal names the value; source and thresholds stay."""
    before = world.client.pressure.status()
    for high, low, named in ((0.5, 0.9, "low = 0.9"), (7.0, 0.5, "high = 7.0")):
        with pytest.raises(InvalidArgument, match=named):
            world.client.pressure.set_thresholds(high, low)
    for name in ("magic", "module:absent_module_of_mine", "module:json"):
        with pytest.raises(InvalidArgument, match=name):
            world.client.pressure.set_source(name)
    assert world.client.pressure.status() == before
    moved = world.client.pressure.set_thresholds(0.92, 0.5)
    assert (moved.high_watermark, moved.low_watermark) == (0.92, 0.5)


def test_sources_are_switched(world: World) -> None:
    """`noop` is never under pressure, `system` reads this machine."""
    assert world.client.pressure.set_source("noop").source == "noop"
    assert world.client.pressure.check().last_result == "below_high"
    world.client.pressure.set_source("system")
    assert 0 < world.client.pressure.sample().ratio <= 1


def test_a_source_that_fails_is_told(world: World) -> None:
    """A check says why there is no reading, a sample refuses; the poller lives on."""
    pid = world.client.processes()["pressure"]
    world.read(-1, 100)
    result = world.client.pressure.check().last_result
    assert result.startswith("source_failed: ")
    assert "(-1, 100)" in result
    with pytest.raises(NotSupported, match="gives no reading"):
        world.client.pressure.sample()
    assert world.client.processes()["pressure"] == pid


def test_idle_models_go_when_there_is_nothing_to_evict(unloading: World) -> None:
    """Idle sessions give way, then the least recently used idle model goes; a busy one stays; observers are truthful."""
    client = unloading.client
    first, second, third = (caching.load(client, name=name) for name in ("first", "second", "third"))
    busy = caching.load(client, name="busy", step_ms=20)
    for model in (second, first, third):
        client.complete(model, "1 2 3 4 5", response_tokens=1, session_id="s")
    with client.stream(busy, "1 2 3", response_tokens=2000) as stream:
        next(stream)
        unloading.follow_models(120, total=500)
        status = client.pressure.check()
        assert (status.last_result, status.models_unloaded_total) == ("relieved", 1)
        assert {row.model_id for row in client.models()} == {first, third, busy}
        with pytest.raises(NotFound):
            client.model_info(second)
        with pytest.raises(NoSession):
            client.continue_(first, [1], session_id="s")
        unloading.read(99, 100)
        status = client.pressure.check()
        assert (status.last_result, status.models_unloaded_total) == ("no_effect", 3)
        assert [row.model_id for row in client.models()] == [busy]
        stream.cancel()


def test_observers_answer_while_a_model_computes(world: World) -> None:
    """While a model is inside one long step, observers and the poller answer, and tell what it does."""
    model = caching.load(world.client, step_ms=3000)
    with world.client.stream(model, "1 2 3", response_tokens=3) as stream:
        wait_for(lambda: world.client.phase(model) in ("prefilling", "generating"), "the model computes")
        assert world.client.queue_depth(model) == 1
        assert world.client.pending_len(model) == 0
        assert world.client.last_cache_hit(model) is None or world.client.last_cache_hit(model)
        assert world.client.pressure.status().source == NAME
        assert world.client.phase(model) in ("prefilling", "generating")
        stream.cancel()
        assert any(isinstance(event, StreamEvent) and event.result for event in stream)
    world.client.unload(model)
