"""Crash reports as the doctor reads and tells them (barrel_inference/cli/crashes.py)."""

import json

import pytest

from barrel_inference.cli import crashes, logs
from barrel_inference.cli.crashes import Death


def line(process: str, **fields: object) -> logs.Line:
    """One line of a log."""
    text = json.dumps({"process": process, "timestamp": "2026-01-02T03:04:05.6Z", **fields})
    return logs.parse(text, process, "")


def exited(child: str, reason: str, *, outcome: str = "restarting", incarnation: int = 7) -> logs.Line:
    """What the supervisor writes about a death."""
    return line(
        "supervisor", event="child.exited", child=child, incarnation_of_child=incarnation, reason=reason, uptime_s=61.0,
        deaths=1, limit=5, outcome=outcome, delay_s=0.05,
    )  # fmt: skip


def test_deaths_are_found_with_their_tracebacks() -> None:
    """A death has the traceback that this incarnation wrote; stops, clean exits and other lines are no deaths."""
    supervisor = [
        exited("index", "exit status 70: KeyError: 'x'"),
        exited("index", "signal SIGKILL", incarnation=8),
        exited("router", "exit status 0"),
        exited("model:m", "signal SIGTERM", outcome="stopped"),
        line("supervisor", event="supervisor.ready"),
        logs.parse("noise", "supervisor", ""),
    ]
    own = [line("index", event="child.crashed", incarnation=7, traceback="Traceback ...\nKeyError: 'x'\n")]
    first, second = crashes.found(supervisor, own)
    assert (first.process, first.traceback) == ("index", "Traceback ...\nKeyError: 'x'")
    assert (second.reason, second.traceback) == ("signal SIGKILL", "")
    assert crashes.told(first).splitlines() == [
        "2026-01-02 03:04:05  index died after 1m 01s (restarting, 1 of 5 deaths allowed): exit status 70: KeyError: 'x'",
        "    Traceback ...",
        "    KeyError: 'x'",
        "    → this is a bug of Barrel Inference: report it with the traceback above",
    ]


@pytest.mark.parametrize(
    ("process", "reason", "outcome", "says"),
    [
        ("model:m", "signal SIGKILL", "restarting", "journalctl -k"),
        ("model:m", "signal SIGKILL", "failed", "load it anew"),
        ("model:m", "signal SIGABRT: GGML_ASSERT", "restarting", "barrelctl logs model:m"),
        ("model:m", "signal SIGILL", "restarting", "reinstall llama-cpp-python"),
        ("model:m", "hung: one call took 60000 ms, 1000 ms were allowed", "restarting", "decode_budget_ms"),
        ("index", "hung: no sign of life for 11.0 s", "restarting", "supervisor.hang_s"),
        ("tier:disk", "exit status 78: the root cannot be used", "failed", "barrelctl restart tier:disk"),
        ("index", "signal SIGTERM", "gave_up", "barrelctl start"),
        ("writer:0", "exit status 3", "restarting", "barrelctl logs writer:0"),
    ],
)
def test_each_death_has_an_advice(process: str, reason: str, outcome: str, says: str) -> None:
    """For every way to die there is something to do."""
    assert says in crashes.advice(Death("", process, 1, reason, 2.0, 1, 5, outcome))
