"""top: a live view of the runtime. What is shown is a `Snapshot`; how, is decided from it alone."""

import contextlib
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from barrel_inference.cli import context, output

if TYPE_CHECKING:
    from rich.console import RenderableType

    from barrel_inference.client import Client

# Requests that the hit rate of a model is taken from.
_RATE_REQUESTS = 200

_BAR_CELLS = 20
_MIN_REQUESTS = 3
_CURSOR_LINES = 1


@dataclass(frozen=True, slots=True)
class ProcessLine:
    """One process."""

    id: str
    state: str
    memory_bytes: int
    cpu_percent: float
    restarts: int
    uptime_s: float


@dataclass(frozen=True, slots=True)
class ModelLine:
    """One model."""

    id: str
    phase: str
    running: int
    waiting: int
    tokens_per_s: float
    hit_rate: float | None  # of its last requests; None before any
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class TierLine:
    """One tier server."""

    name: str
    is_up: bool
    stored_bytes: int
    quota_bytes: int
    rows: int
    note: str


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One finished request."""

    model_id: str
    hit: str  # "exact ram"; for a failed one its code
    read_tokens: int
    prompt_tokens: int
    completion_tokens: int
    ttft_ms: float
    reason: str  # why it was no better hit


@dataclass(frozen=True, slots=True)
class PressureLine:
    """The poller's last reading."""

    enabled: bool
    source: str
    used_bytes: int
    total_bytes: int
    low: float
    high: float
    result: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The runtime at one moment."""

    version: str
    uptime_s: float
    hit_rate: float | None
    processes: tuple[ProcessLine, ...]
    models: tuple[ModelLine, ...]
    tiers: tuple[TierLine, ...]
    requests: tuple[RequestLine, ...]
    pressure: PressureLine | None


# --- what there is ------------------------------------------------------------------------------------------------------


class Collector:
    """Takes snapshots; CPU use is that since the one before."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._before: dict[int, tuple[float, float]] = {}  # by pid: when, CPU seconds until then

    def take(self) -> Snapshot:
        """Ask the runtime and the system."""
        found = self._client.status()
        recent = self._client.recent_requests(_RATE_REQUESTS)
        counters = self._client.counters()
        children = [
            {"id": "supervisor", "state": "ready", "pid": found["supervisor_pid"], "restarts": 0,
             "uptime_s": found["uptime_s"]},
            *found["children"],
        ]  # fmt: skip
        return Snapshot(
            version=found["version"], uptime_s=found["uptime_s"], hit_rate=total_hit_rate(counters),
            processes=tuple(self._process(child) for child in children),
            models=tuple(model_line(row, recent) for row in found["models"]),
            tiers=tuple(
                TierLine(row["server"], row["up"], row["stored_bytes"], row["quota_bytes"], row["rows"], row["note"])
                for row in found["tiers"]
            ),
            requests=tuple(request_line(row) for row in recent), pressure=pressure_line(found["pressure"]),
        )  # fmt: skip

    def _process(self, child: Mapping[str, Any]) -> ProcessLine:
        import psutil  # here: it takes 30 ms to import

        memory_bytes, percent = 0, 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            if child["pid"]:
                process = psutil.Process(child["pid"])
                memory_bytes = process.memory_info().rss
                times = process.cpu_times()
                percent = self._percent(child["pid"], times.user + times.system)
        return ProcessLine(
            child["id"], str(child["state"]), memory_bytes, percent, child["restarts"], child["uptime_s"]
        )

    def _percent(self, pid: int, cpu_s: float) -> float:
        now_s = time.monotonic()
        before_s, before_cpu_s = self._before.get(pid, (now_s, cpu_s))
        self._before[pid] = now_s, cpu_s
        return 100 * (cpu_s - before_cpu_s) / (now_s - before_s) if now_s > before_s else 0.0


def total_hit_rate(counters: Mapping[str, int]) -> float | None:
    """Hits of all requests since the start; None before any. Pure."""
    # hits_live counts in addition to the kind.
    hits = sum(count for name, count in counters.items() if name.startswith("hits_") and name != "hits_live")
    asked = hits + counters.get("misses", 0)
    return hits / asked if asked else None


def model_line(row: Mapping[str, Any], recent: Sequence[Mapping[str, Any]]) -> ModelLine:
    """A model's row with the hit rate of its last requests. Pure."""
    kinds = Counter(str(one["kind"]) for one in recent if one["model_id"] == row["model_id"] and one.get("kind"))
    asked = kinds.total()
    return ModelLine(
        id=row["model_id"], phase=str(row["phase"]), running=row["running"], waiting=row["pending_len"],
        tokens_per_s=row["tokens_per_s"], hit_rate=1 - kinds["cold"] / asked if asked else None,
        memory_bytes=sum(row["memory_bytes"].values()),
    )  # fmt: skip


def request_line(row: Mapping[str, Any]) -> RequestLine:
    """A finished request's statistics. Pure."""
    hit = " ".join(str(part) for part in (row.get("kind"), row.get("source")) if part)
    return RequestLine(
        model_id=row["model_id"], hit=row.get("code") or hit or "-", read_tokens=row.get("read_tokens") or 0,
        prompt_tokens=row.get("prompt_tokens") or 0, completion_tokens=row.get("completion_tokens") or 0,
        ttft_ms=row.get("ttft_ms") or 0.0, reason=row.get("miss_reason") or "",
    )  # fmt: skip


def pressure_line(status: Mapping[str, Any] | None) -> PressureLine | None:
    """What the poller told. Pure."""
    if not status:
        return None
    return PressureLine(
        enabled=status["enabled"], source=status["source"], used_bytes=status["used_bytes"],
        total_bytes=status["total_bytes"], low=status["low_watermark"], high=status["high_watermark"],
        result=status["last_result"] or "",
    )  # fmt: skip


# --- how it looks -------------------------------------------------------------------------------------------------------


def render(shot: Snapshot, height: int) -> "RenderableType":
    """The view, for that many lines of a terminal of 80 columns or more. Pure."""
    from rich.console import Group  # here, because most of barrelctl's start would be rich

    # Two lines at the top, and of each table an empty line, its head, and a row at least.
    taken = 2 + sum(2 + max(1, count) for count in (len(shot.models), len(shot.tiers), len(shot.processes))) + 2
    requests = shot.requests[: max(_MIN_REQUESTS, height - taken - _CURSOR_LINES)]
    return Group(
        _head(shot), _pressure(shot.pressure), "", _models(shot.models), "", _tiers(shot.tiers), "",
        _requests(requests), "", _processes(shot.processes),
    )  # fmt: skip


def bar(share: float, marks: Sequence[float] = ()) -> str:
    """A share as a bar of 20 cells, with `|` where the marks are. Pure."""
    full = round(max(0.0, min(1.0, share)) * _BAR_CELLS)
    cells = ["█" if number < full else "·" for number in range(_BAR_CELLS)]
    for mark in marks:
        cells[min(_BAR_CELLS - 1, int(mark * _BAR_CELLS))] = "|"
    return "".join(cells)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


# Of a picture that goes into a file or a pipe.
_PIPE_WIDTH = 100


def _head(shot: Snapshot) -> Any:
    from rich.text import Text

    rate = sum(model.tokens_per_s for model in shot.models)
    queue = sum(model.running + model.waiting for model in shot.models)
    return Text(
        f"Barrel Inference {shot.version}  up {output.duration(shot.uptime_s)}  queue {queue}  {rate:.1f} tok/s  "
        f"hits {_percent(shot.hit_rate)}  q quits", style="bold", no_wrap=True, overflow="ellipsis",
    )  # fmt: skip


def _pressure(line: PressureLine | None) -> Any:
    from rich.text import Text

    if line is None:
        return Text("memory: the poller does not answer", style="yellow")
    if not line.total_bytes:
        return Text("memory: not read yet" if line.enabled else "memory: poller off", style="dim")
    ratio = line.used_bytes / line.total_bytes
    colour = "red" if ratio >= line.high else "yellow" if ratio > line.low else "green"
    state = line.result if line.enabled else "poller off"
    return Text.assemble(
        "memory ", (bar(ratio, (line.low, line.high)), colour),
        f" {ratio:.0%} of {output.size(line.total_bytes)} (low {line.low:.0%} high {line.high:.0%}) "
        f"{line.source} {state}", no_wrap=True, overflow="ellipsis",
    )  # fmt: skip


def _table(columns: Sequence[tuple[str, int]], rows: Sequence[Sequence[Any]], empty: str) -> Any:
    """A table without borders. A width below 0 is that of a right-aligned column; 0 = what is left."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", expand=True, padding=(0, 1, 0, 0))
    for name, width in columns:
        table.add_column(
            name, justify="right" if width < 0 else "left", width=abs(width) or None, ratio=None if width else 1,
            no_wrap=True, overflow="ellipsis",
        )  # fmt: skip
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    if not rows:
        table.add_row(Text(empty, style="dim"))
    return table


def _models(models: Sequence[ModelLine]) -> Any:
    columns = [("MODEL", 0), ("PHASE", 11), ("RUN", -4), ("WAIT", -5), ("TOK/S", -7), ("HITS", -5), ("MEMORY", -10)]
    rows = [
        [
            model.id, output.state(model.phase), model.running, model.waiting, f"{model.tokens_per_s:.1f}",
            _percent(model.hit_rate), output.size(model.memory_bytes),
        ]
        for model in models
    ]  # fmt: skip
    return _table(columns, rows, "no model")


def _tiers(tiers: Sequence[TierLine]) -> Any:
    columns = [("TIER", 14), ("USE", _BAR_CELLS), ("STORED", -10), ("QUOTA", -10), ("ROWS", -7), ("NOTE", 0)]
    rows = [
        [
            tier.name, bar(tier.stored_bytes / tier.quota_bytes if tier.quota_bytes else 0.0),
            output.size(tier.stored_bytes), output.size(tier.quota_bytes), tier.rows,
            tier.note if tier.is_up else "down",
        ]
        for tier in tiers
    ]  # fmt: skip
    return _table(columns, rows, "no tier")


def _requests(requests: Sequence[RequestLine]) -> Any:
    columns = [("REQUEST", 0), ("HIT", 16), ("READ", -6), ("PROMPT", -6), ("NEW", -5), ("TTFT", -9), ("WHY", 17)]
    rows = [
        [
            one.model_id, one.hit, one.read_tokens, one.prompt_tokens, one.completion_tokens, f"{one.ttft_ms:.0f} ms",
            one.reason,
        ]
        for one in requests
    ]  # fmt: skip
    return _table(columns, rows, "none yet")


def _processes(processes: Sequence[ProcessLine]) -> Any:
    columns = [("PROCESS", 0), ("STATE", 9), ("MEMORY", -10), ("CPU", -6), ("RESTARTS", -8), ("UP", -9)]
    rows = [
        [
            one.id, output.state(one.state), output.size(one.memory_bytes), f"{one.cpu_percent:.0f}%", one.restarts,
            output.duration(one.uptime_s),
        ]
        for one in processes
    ]  # fmt: skip
    return _table(columns, rows, "none")


# --- the command --------------------------------------------------------------------------------------------------------


def top(
    interval_s: Annotated[float, typer.Option("--interval", help="Seconds between two looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end; also without a terminal.")] = False,
) -> None:
    """Watch the runtime: models, cache tiers, requests, processes. `q` or Ctrl-C ends it.

    Example: barrelctl top --interval 2
    """
    with context.connected(timeout_s=10.0) as client:
        collector = Collector(client)
        if once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            shot = collector.take()
            is_terminal = sys.stdout.isatty()
            height = os.get_terminal_size().lines if is_terminal else 40
            output.out().print(render(shot, height), width=None if is_terminal else _PIPE_WIDTH)
            return
        with contextlib.suppress(KeyboardInterrupt):
            _watch(collector, interval_s)


def _watch(collector: Collector, interval_s: float) -> None:
    from rich.live import Live

    console = output.out()
    with _keys() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(render(collector.take(), console.size.height), refresh=True)
            until_s = time.monotonic() + interval_s
            while (left_s := until_s - time.monotonic()) > 0:
                if select.select([keyboard], [], [], left_s)[0] and os.read(keyboard, 1) in (b"q", b"Q", b""):
                    return


@contextlib.contextmanager
def _keys() -> Iterator[int]:
    """Standard input key by key, unseen; the terminal is as before at the end."""
    import termios
    import tty

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
