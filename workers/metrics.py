"""What Prometheus may scrape from the router: rows, counters, tiers and statistics of requests, and no text.

Off by default; then nothing here is even imported. A scrape asks what observers ask, so no model process is waited for. The
page is `GET /metrics` on a Unix socket or a loopback port; there is no other.
"""

import asyncio
import contextlib
import http
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from barrel_inference import protocol
from barrel_inference.errors import InvalidArgument, ProtocolError
from barrel_inference.protocol import HitKind, ModelRow, RequestEnded, StatusReply

REQUEST_DEADLINE_S = 5.0  # for a scraper to say what it wants, and again to take it
MAX_REQUEST_BYTES = 8192
MAX_SCRAPERS = 16

# From a token of a small model to the prefill of a long prompt on a slow machine.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Address(NamedTuple):
    """Where to listen: a path, or a host and a port."""

    path: Path | None
    host: str = ""
    port: int = 0


def address_of(listen: str) -> Address:
    """`metrics.listen`, which was checked with the configuration, taken apart."""
    if listen.startswith("unix:"):
        return Address(Path(listen.removeprefix("unix:")))
    host, _, port = listen.rpartition(":")
    return Address(None, host.strip("[]"), int(port))


class Figures(NamedTuple):
    """What is known at the moment of a scrape."""

    status: StatusReply
    counters: Mapping[str, int]  # empty while the index is down


# --- from figures to metrics, pure ----------------------------------------------------------------------------------------


def families(figures: Figures) -> Iterator[Metric]:
    """Every metric but those of single requests."""
    status = figures.status
    yield _gauge("uptime_seconds", "Seconds since the supervisor was started.", [((), status.uptime_s)])
    children = status.children
    is_up = [((child.id,), float(child.state == "ready")) for child in children]
    yield _gauge("process_up", "1 while the process serves.", is_up, ("process",))
    restarts = [((child.id,), float(child.restarts)) for child in children]
    yield _counter("process_restarts", "Restarts of the process.", restarts, ("process",))
    yield from _model_families(status.models)
    for name in ("stored_bytes", "reserved_bytes", "quota_bytes", "rows"):
        values = [((str(tier["server"]),), float(tier[name])) for tier in status.tiers]
        yield _gauge(f"tier_{name}", f"{name.replace('_', ' ').capitalize()} of the cache tier.", values, ("tier",))
    yield from _pressure_families(status)
    yield from _counter_families(figures.counters)


def _model_families(models: Iterable[ModelRow]) -> Iterator[Metric]:
    rows = list(models)
    phases = [((row.model_id, row.phase.value), 1.0) for row in rows]
    yield _gauge("model_phase", "1 for the phase that the model is in.", phases, ("model", "phase"))
    for name, field, text in (
        ("model_running", "running", "Requests that run."),
        ("model_waiting", "pending_len", "Requests that wait."),
        ("model_tokens_per_second", "tokens_per_s", "Tokens generated per second at present."),
        ("model_available_sequences", "available_seqs", "Sequences a new request could get at once."),
    ):
        yield _gauge(name, text, [((row.model_id,), float(getattr(row, field))) for row in rows], ("model",))
    memory = [((row.model_id, part), float(size)) for row in rows for part, size in row.memory_bytes.items()]
    yield _gauge("model_memory_bytes", "Memory of the model, by what it is for.", memory, ("model", "part"))


def _pressure_families(status: StatusReply) -> Iterator[Metric]:
    pressure = status.pressure or {}
    for key in ("used_bytes", "total_bytes", "high_watermark", "low_watermark"):
        if pressure.get(key) is not None:
            text = f"{key.replace('_', ' ').capitalize()} of the pressure source at its last reading."
            yield _gauge(f"pressure_{key}", text, [((), float(pressure[key]))])
    for key, text in (
        ("evicted_bytes_total", "Bytes evicted because memory ran short."),
        ("models_unloaded_total", "Models unloaded because memory ran short."),
    ):
        if key in pressure:
            yield _counter(f"pressure_{key.removesuffix('_total')}", text, [((), float(pressure[key]))])


def _counter_families(counters: Mapping[str, int]) -> Iterator[Metric]:
    """The counters of docs/reference/counters.md; times in seconds, and bytes stored left to the tiers' gauges."""
    for name, value in counters.items():
        if name.endswith("_ns"):
            base = name.removesuffix("_ns").removesuffix("_total")
            yield _counter(f"{base}_seconds", f"The counter {name}, in seconds.", [((), value / 1e9)])
        elif not re.fullmatch("bytes_(ram|ram_file|disk)", name):
            yield _counter(name, f"The counter {name}.", [((), float(value))])


Values = Sequence[tuple[tuple[str, ...], float]]


def _gauge(name: str, text: str, values: Values, labels: tuple[str, ...] = ()) -> Metric:
    return _filled(GaugeMetricFamily(f"barrel_{name}", text, labels=labels), values)


def _counter(name: str, text: str, values: Values, labels: tuple[str, ...] = ()) -> Metric:
    return _filled(CounterMetricFamily(f"barrel_{name}", text, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for labels, value in values:
        family.add_metric(labels, value)
    return family


# --- single requests --------------------------------------------------------------------------------------------------------


class Ended(msgspec.Struct, frozen=True):
    """What is used of the statistics of a request (workers/model/reporting.py)."""

    kind: HitKind | None
    finish_reason: str
    prompt_tokens: protocol.Count
    read_tokens: protocol.Count
    completion_tokens: protocol.Count
    queue_ms: float
    restore_ms: float
    prefill_ms: float
    generation_ms: float
    ttft_ms: float


class Requests:
    """Counters and histograms of the requests that have ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # twice the series, for nobody here
        self._ended = Counter(
            "barrel_requests", "Requests that ended, by cache hit kind (none: it got no sequence) and finish reason.",
            ("model", "kind", "finish_reason"), registry=registry,
        )  # fmt: skip
        self._tokens = {
            key: Counter(f"barrel_request_{key}", f"{text} of requests that ended.", ("model",), registry=registry)
            for key, text in (
                ("prompt_tokens", "Prompt tokens"), ("read_tokens", "Prompt tokens taken from the cache"),
                ("completion_tokens", "Generated tokens"),
            )
        }  # fmt: skip
        self._seconds = {
            key: Histogram(
                f"barrel_request_{key.removesuffix('_ms')}_seconds", text, ("model", "kind"), registry=registry,
                buckets=SECONDS,
            )
            for key, text in (
                ("queue_ms", "Waiting for a sequence."), ("restore_ms", "Lookup and restore."),
                ("prefill_ms", "Prefill."), ("generation_ms", "From the first token to the end."),
                ("ttft_ms", "From arrival to the first token."),
            )
        }  # fmt: skip

    def ended(self, message: RequestEnded) -> None:
        """Count one; raises `ProtocolError` if it is not what models send."""
        try:
            stats, model = msgspec.convert(message.stats, Ended), message.model_id
        except msgspec.ValidationError as bad:
            raise ProtocolError(f"request_ended: {bad}") from None
        kind = stats.kind or "none"
        self._ended.labels(model, kind, stats.finish_reason).inc()
        for key, counter in self._tokens.items():
            counter.labels(model).inc(getattr(stats, key))
        for key, histogram in self._seconds.items():
            histogram.labels(model, kind).observe(getattr(stats, key) / 1000)


class _Latest(Collector):
    """Hands the figures of a scrape to the library, which asks for them by itself."""

    figures: Figures | None = None

    def collect(self) -> Iterable[Metric]:
        return families(self.figures) if self.figures is not None else ()


# --- the page -----------------------------------------------------------------------------------------------------------------


class Metrics:
    """The listener. `look` fetches the figures of a scrape."""

    def __init__(self, look: Callable[[], Awaitable[Figures]]) -> None:
        self._look = look
        self._registry = CollectorRegistry()
        self._latest = _Latest()
        self._registry.register(self._latest)
        self.requests = Requests(self._registry)
        self._scrapers = 0
        self._server: asyncio.Server | None = None
        self._path: Path | None = None

    async def open(self, listen: str) -> None:
        """Listen, or raise `InvalidArgument`."""
        path, host, port = address_of(listen)
        try:
            if path is not None:
                self._server = await asyncio.start_unix_server(self._serve, path, limit=MAX_REQUEST_BYTES)
                self._path = path
            else:
                self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_REQUEST_BYTES)
        except OSError as error:
            raise InvalidArgument(
                f"cannot listen at metrics.listen = {listen!r}: {error.strerror}", hint="choose another place, or none"
            ) from None

    async def close(self) -> None:
        """Stop listening and remove the socket's file."""
        if self._server is not None:
            self._server.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        self._latest.figures = await self._look()
        return prometheus_client.generate_latest(self._registry)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, one answer. Whatever a scraper does wrong ends its connection and nothing else."""
        self._scrapers += 1
        try:
            if self._scrapers <= MAX_SCRAPERS:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_DEADLINE_S)
                writer.write(await self._answer(head.split(b"\r\n", 1)[0]))
                await asyncio.wait_for(writer.drain(), REQUEST_DEADLINE_S)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self._scrapers -= 1
            with contextlib.suppress(OSError):
                writer.close()

    async def _answer(self, request_line: bytes) -> bytes:
        method, _, rest = request_line.partition(b" ")
        target = rest.partition(b" ")[0].partition(b"?")[0]
        if target != b"/metrics":
            return _response(http.HTTPStatus.NOT_FOUND, b"the page is /metrics\n", "text/plain")
        if method not in (b"GET", b"HEAD"):
            return _response(http.HTTPStatus.METHOD_NOT_ALLOWED, b"use GET\n", "text/plain")
        body = await self.page()
        answer = _response(http.HTTPStatus.OK, body, prometheus_client.CONTENT_TYPE_LATEST)
        return answer if method == b"GET" else answer[: len(answer) - len(body)]


def _response(status: http.HTTPStatus, body: bytes, content_type: str) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
