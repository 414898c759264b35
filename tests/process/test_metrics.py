"""The router's page for Prometheus, as a scraper gets it."""

import contextlib
import http.client
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from barrel_inference import Runtime
from barrel_inference.errors import BarrelError
from tests.process.killing import came_back, kill, wait_for

SMALL = {
    "tiers": {"ram": {"quota_bytes": "64MiB"}, "ram_file": {"enabled": False}, "disk": {"enabled": False}},
    "writer": {"processes": 1},
}


@pytest.fixture
def place() -> Iterator[Path]:
    """Where a socket of the router can be."""
    folder = Path(tempfile.mkdtemp(prefix="bm-", dir="/tmp"))
    yield folder / "metrics"
    shutil.rmtree(folder)


class UnixConnection(http.client.HTTPConnection):
    """HTTP to a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        """Connect there."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(str(self._path))


def scrape(connection: http.client.HTTPConnection) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels in alphabetic order, read as Prometheus reads it."""
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert answer.status == 200
        text = answer.read().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text) for sample in family.samples
    }  # fmt: skip


def answers(place: Path) -> bool:
    """Does somebody serve the page?"""
    try:
        return bool(scrape(UnixConnection(place)))
    except OSError:
        return False


def test_scrape_over_a_unix_socket(place: Path) -> None:
    """A scrape tells of processes, tiers, models, and requests that ended; the socket is this user's, and goes at the end."""
    with Runtime({**SMALL, "metrics": {"listen": f"unix:{place}"}}) as runtime:
        client = runtime.client()
        client.load_model("any", "m", backend="stub")
        client.complete("m", "one two three", response_tokens=2)
        wait_for(lambda: client.counters()["misses"] == 1, "the index has heard of it")
        assert place.stat().st_mode & 0o077 == 0
        found = scrape(UnixConnection(place))
        assert found["barrel_process_up", "index"] == 1
        assert found["barrel_requests_total", "length", "cold", "m"] == 1
        assert found["barrel_request_completion_tokens_total", "m"] == 2
        assert found[("barrel_misses_total",)] == 1
        assert found["barrel_tier_quota_bytes", "tier:ram"] == 64 << 20
        came_back(runtime, "router", kill(runtime, "router"))
        wait_for(lambda: answers(place), "a new router takes the old one's place")
    assert not place.exists()


def test_scrapers_that_do_wrong(place: Path) -> None:
    """Other pages, other methods, endless headers and silence get a refusal or the end of the connection; the next is served."""
    with Runtime({**SMALL, "metrics": {"listen": f"unix:{place}"}}):
        for method, path, status in (("GET", "/", 404), ("POST", "/metrics", 405), ("GET", "/metrics?x=1", 200)):
            with contextlib.closing(UnixConnection(place)) as connection:
                connection.request(method, path)
                assert connection.getresponse().status == status
        for said in (b"", b"GET /metrics HTTP/1.1\r\n", b"\xff" * 100_000, b"\r\n\r\n"):
            raw = socket.socket(socket.AF_UNIX)
            raw.connect(str(place))
            raw.send(said[:20_000])
            raw.close()
        assert scrape(UnixConnection(place))["barrel_process_up", "router"] == 1


def test_scrape_over_a_loopback_port() -> None:
    """The page is at the port; a port that is taken is said at the start."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BarrelError, match=rf"metrics\.listen = '127.0.0.1:{port}'"):
            Runtime({**SMALL, "metrics": {"listen": f"127.0.0.1:{port}"}})
    with Runtime({**SMALL, "metrics": {"listen": f"127.0.0.1:{port}"}}):
        assert scrape(http.client.HTTPConnection("127.0.0.1", port, timeout=30))["barrel_process_up", "router"] == 1
