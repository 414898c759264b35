"""What a scrape holds, from the figures alone."""

from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry

from barrel_inference import config, protocol
from barrel_inference.errors import InvalidArgument, ProtocolError
from barrel_inference.protocol import ChildRow, RequestEnded, StatusReply
from barrel_inference.workers.index import COUNTERS
from barrel_inference.workers.metrics import Address, Figures, Requests, address_of, families
from barrel_inference.workers.model.reporting import completed, statistics
from barrel_inference.workers.registry import Registry
from tests.unit.test_reporting import job

STATS: dict[str, Any] = {
    "kind": "partial", "finish_reason": "stop", "prompt_tokens": 100, "read_tokens": 60, "completion_tokens": 7,
    "queue_ms": 1.0, "restore_ms": 2.0, "prefill_ms": 300.0, "generation_ms": 400.0, "ttft_ms": 303.0, "extra": "x",
}  # fmt: skip


def figures(*, pressure: dict[str, Any] | None = None) -> Figures:
    """A runtime with one model, one tier and two processes."""
    registry = Registry()
    registry.load_began("tiny", backend="stub", context_size=512, tier="ram")
    status = StatusReply(
        version="1", uptime_s=12.5, runtime_dir="/r", state_dir="/s", log_dir="/s/log", supervisor_pid=1, cores=2, pressure=pressure,
        children=[
            ChildRow(id="index", group="helper", state="ready", incarnation=1, restarts=3),
            ChildRow(id="writer:0", group="helper", state="backoff", incarnation=1),
        ],
        models=registry.rows(),
        tiers=[{"server": "tier:ram", "stored_bytes": 5, "reserved_bytes": 0, "quota_bytes": 10, "rows": 1}],
    )  # fmt: skip
    return Figures(status, {"misses": 4, "pack_total_ns": 2_500_000_000, "longest_prefix_ns": 0, "bytes_ram": 5})


def samples(found: Figures) -> dict[tuple[str, ...], float]:
    """Each sample by its name and label values."""
    return {
        (sample.name, *sample.labels.values()): sample.value for family in families(found) for sample in family.samples
    }


def test_figures_become_samples() -> None:
    """Processes, models, tiers and counters are there, times in seconds; bytes stored are the tiers' alone."""
    found = samples(figures())
    assert found["barrel_process_up", "index"] == 1
    assert found["barrel_process_up", "writer:0"] == 0
    assert found["barrel_process_restarts_total", "index"] == 3
    assert found["barrel_model_phase", "tiny", "loading"] == 1
    assert found["barrel_tier_stored_bytes", "tier:ram"] == 5
    assert found[("barrel_misses_total",)] == 4
    assert found[("barrel_pack_seconds_total",)] == 2.5
    assert not any(name[0].startswith("barrel_bytes_ram") for name in found)


def test_no_sample_is_made_up() -> None:
    """While the pressure poller or the index does not answer, their figures are absent and not 0."""
    assert not any("pressure" in name[0] for name in samples(figures()))
    found = samples(figures(pressure={"used_bytes": None, "total_bytes": None, "evicted_bytes_total": 9}))
    assert ("barrel_pressure_used_bytes",) not in found
    assert found[("barrel_pressure_evicted_bytes_total",)] == 9


def test_every_counter_has_a_name_of_its_own() -> None:
    """All counters of the index together make a page that Prometheus takes."""
    names = [family.name for family in families(Figures(figures().status, dict.fromkeys(COUNTERS, 1)))]
    assert len(names) == len(set(names))


def test_requests_are_counted_and_timed() -> None:
    """A request that ended counts once, with its tokens, under its model and hit kind."""
    registry = CollectorRegistry()
    requests = Requests(registry)
    requests.ended(RequestEnded(model_id="m", request_id="r", stats=STATS))
    requests.ended(RequestEnded(model_id="m", request_id="s", stats={**STATS, "kind": None, "finish_reason": "error"}))
    value = registry.get_sample_value
    assert value("barrel_requests_total", {"model": "m", "kind": "partial", "finish_reason": "stop"}) == 1
    assert value("barrel_requests_total", {"model": "m", "kind": "none", "finish_reason": "error"}) == 1
    assert value("barrel_request_read_tokens_total", {"model": "m"}) == 120
    assert value("barrel_request_ttft_seconds_bucket", {"model": "m", "kind": "partial", "le": "0.5"}) == 1
    assert value("barrel_request_ttft_seconds_sum", {"model": "m", "kind": "partial"}) == pytest.approx(0.303)
    assert b"_created" not in prometheus_client.generate_latest(registry)


@pytest.mark.parametrize("wrong", [{}, {"prompt_tokens": -1}, {"kind": "made up"}, {"ttft_ms": "soon"}])
def test_what_no_model_sends_is_refused(wrong: dict[str, Any]) -> None:
    """Statistics that are not as they should be are an error of the protocol and count nothing."""
    registry = CollectorRegistry()
    with pytest.raises(ProtocolError):
        Requests(registry).ended(RequestEnded(model_id="m", request_id="r", stats={**STATS, **wrong} if wrong else {}))
    assert registry.get_sample_value("barrel_request_read_tokens_total", {"model": "m"}) is None


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("unix:/run/m", Address(Path("/run/m"))), ("127.0.0.1:9100", Address(None, "127.0.0.1", 9100)),
        ("[::1]:9100", Address(None, "::1", 9100)), ("localhost:1", Address(None, "localhost", 1)),
    ],
)  # fmt: skip
def test_places_to_listen(listen: str, expected: Address) -> None:
    """A path or a loopback port."""
    found = config.settings_from(config.lay_over({"metrics": {"listen": listen}}))
    assert address_of(config.resolve(found).metrics.listen) == expected


@pytest.mark.parametrize("listen", ["0.0.0.0:9100", ":9100", "127.0.0.1:0", "127.0.0.1:65536", "[::]:1", "unix:", "x"])
def test_places_where_others_could_look_are_refused(listen: str) -> None:
    """What is no path and no port of this machine alone is a problem of the configuration, with its value."""
    with pytest.raises(InvalidArgument, match=r"metrics\.listen = "):
        config.settings_from(config.lay_over({"metrics": {"listen": listen}}))


def test_relative_path_is_made_absolute() -> None:
    """The router runs in another directory than who wrote the configuration."""
    found = config.settings_from(config.lay_over({"metrics": {"listen": "unix:here/m"}}))
    assert config.resolve(found).metrics.listen == f"unix:{Path('here/m').absolute()}"


def test_request_statistics_of_a_model_are_taken() -> None:
    """What a model's own code makes of a request fits."""
    stats = statistics(job(), completed(job(), (), None, 0), 1.0)
    Requests(CollectorRegistry()).ended(protocol.RequestEnded(model_id="m", request_id="r", stats=stats))
