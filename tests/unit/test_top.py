"""What `barrelctl top` shows of a snapshot."""

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from barrel_inference.cli import top
from barrel_inference.cli.top import ModelLine, PressureLine, ProcessLine, RequestLine, Snapshot, TierLine

MIB = 1 << 20
GIB = 1 << 30
SHOT = Snapshot(
    version="0.1.0", uptime_s=7384, hit_rate=0.83,
    processes=(
        ProcessLine("supervisor", "ready", 31 * MIB, 0.1, 0, 7384), ProcessLine("router", "ready", 38 * MIB, 1.2, 0, 7384),
        ProcessLine("tier:ram", "ready", 33 * MIB, 0.0, 0, 7384), ProcessLine("model:smol", "ready", 420 * MIB, 187, 1, 1200),
    ),
    models=(
        ModelLine("smol", "generating", 2, 1, 41.7, 0.91, 420 * MIB),
        ModelLine("a_model_with_a_name_that_is_much_too_long_for_its_column", "idle", 0, 0, 0.0, None, GIB),
    ),
    tiers=(
        TierLine("tier:ram", True, 3 * GIB, 4 * GIB, 2310, ""), TierLine("tier:disk", False, 0, 32 * GIB, 11873, ""),
    ),
    requests=(
        RequestLine("smol", "exact ram", 2048, 2049, 64, 41.0, ""),
        RequestLine("smol", "cold", 0, 733, 128, 812.0, "nothing_stored"),
        RequestLine("smol", "context_overflow", 0, 9000, 0, 0.0, ""),
    ),
    pressure=PressureLine(True, "system", 11 * GIB, 16 * GIB, 0.75, 0.85, "below_high"),
)  # fmt: skip


def picture(shot: Snapshot, *, width: int = 80, height: int = 40) -> list[str]:
    """The lines of the view, without colours."""
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as taken:
        console.print(top.render(shot, height))
    return taken.get().splitlines()


def test_everything_is_readable_at_80_columns() -> None:
    """No line is longer, no figure is cut, and every part is there."""
    lines = picture(SHOT)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for shown in (
        "up 2h 03m", "queue 3", "41.7 tok/s", "hits 83%", "69% of 16.0 GiB (low 75% high 85%) system below_high",
        "generating", "91%", "420.0 MiB", "3.0 GiB", "2310", "down", "exact ram", "812 ms", "nothing_stored", "187%",
        "context_overflow", "20m 00s",
    ):  # fmt: skip
        assert shown in text


def test_it_fits_the_terminal() -> None:
    """With many requests only as many are shown as there is room for."""
    shot = replace(SHOT, requests=SHOT.requests * 100)
    assert len(picture(shot, height=40)) == 39
    assert len(picture(shot, height=5)) == len(picture(SHOT))


def test_an_empty_runtime_is_shown() -> None:
    """Without models, requests and poller each part says so."""
    shot = replace(SHOT, models=(), tiers=(), requests=(), processes=(), pressure=None, hit_rate=None)
    text = "\n".join(picture(shot))
    for said in ("no model", "no tier", "none yet", "does not answer", "hits -"):
        assert said in text


def test_names_of_users_are_no_markup() -> None:
    """Brackets in a name are shown as they are."""
    shot = replace(SHOT, models=(replace(SHOT.models[0], id="[red]x[/red]"),))
    assert any("[red]x[/red]" in line for line in picture(shot))


@pytest.mark.parametrize(
    ("share", "marks", "cells"),
    [
        (0.0, (), "·" * 20), (1.0, (), "█" * 20), (7.0, (), "█" * 20), (0.5, (), "█" * 10 + "·" * 10),
        (0.5, (0.75, 1.0), "█" * 10 + "·····|···|"),
    ],
)  # fmt: skip
def test_a_bar(share: float, marks: tuple[float, ...], cells: str) -> None:
    """As many cells are full as the share says; marks stand in their places."""
    assert top.bar(share, marks) == cells


def test_hit_rates() -> None:
    """Hits by kind over all; a live hit counts once; a model's rate is that of its own finished requests."""
    assert top.total_hit_rate({}) is None
    assert top.total_hit_rate({"hits_exact": 2, "hits_sticky": 1, "hits_live": 3, "misses": 1}) == 0.75
    row = {
        "model_id": "a", "phase": "idle", "running": 0, "pending_len": 0, "tokens_per_s": 0.0,
        "memory_bytes": {"weights": 1, "kv": 2},
    }  # fmt: skip
    recent: list[dict[str, Any]] = [{"model_id": "a", "kind": "exact"}, {"model_id": "a", "kind": "cold"}, {"model_id": "b", "kind": "cold"},
              {"model_id": "a", "kind": None}]  # fmt: skip
    line = top.model_line(row, recent)
    assert (line.hit_rate, line.memory_bytes) == (0.5, 3)
    assert top.model_line(row, []).hit_rate is None


def test_a_request_line_says_what_went_wrong() -> None:
    """A failed request shows its code, one that was cut off before it was placed a dash."""
    assert top.request_line({"model_id": "a", "kind": "exact", "source": "ram"}).hit == "exact ram"
    assert top.request_line({"model_id": "a", "kind": None, "code": "seq_capacity"}).hit == "seq_capacity"
    assert top.request_line({"model_id": "a", "kind": None, "source": None}).hit == "-"
