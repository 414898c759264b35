"""Deaths that nobody asked for: joined from the supervisor's log and the dead processes' own, and what to do. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from barrel_inference.cli.logs import Line
from barrel_inference.cli.output import duration

_FROM_LLAMA = ("signal SIGABRT", "signal SIGSEGV", "signal SIGFPE", "signal SIGBUS")


@dataclass(frozen=True, slots=True)
class Death:
    """One crash report."""

    at: str  # ISO 8601, UTC
    process: str
    incarnation: int
    reason: str
    uptime_s: float
    deaths: int  # that count against `limit` now
    limit: int
    outcome: str  # restarting, failed, gave_up
    traceback: str = ""  # of an unexpected exception


def found(supervisor: Iterable[Line], others: Iterable[Line]) -> list[Death]:
    """The deaths in the supervisor's log, oldest first, each with the traceback that its process wrote."""
    tracebacks = {
        (line.process, int(line.fields.get("incarnation", 0))): str(line.fields.get("traceback", "")).strip()
        for line in others
        if line.fields is not None and line.fields["event"] == "child.crashed"
    }
    deaths = []
    for line in supervisor:
        fields = line.fields
        if fields is None or fields["event"] != "child.exited" or fields.get("outcome") == "stopped":
            continue
        process, incarnation = str(fields.get("child", "?")), int(fields.get("incarnation_of_child", 0))
        reason = str(fields.get("reason", ""))
        if reason == "exit status 0":
            continue
        deaths.append(
            Death(
                line.at, process, incarnation, reason, float(fields.get("uptime_s", 0.0)), int(fields.get("deaths", 0)),
                int(fields.get("limit", 0)), str(fields.get("outcome", "")), tracebacks.get((process, incarnation), ""),
            )
        )  # fmt: skip
    return deaths


def advice(death: Death) -> str:
    """What to do about it, in one sentence or two."""
    cause = _about_cause(death)
    if death.outcome == "gave_up":
        return f"{cause}. The runtime has stopped: `barrelctl start` when the cause is gone"
    if death.outcome == "failed" and death.process.startswith("model:"):
        return f"{cause}. It is not started again by itself: load it anew when the cause is gone"
    if death.outcome == "failed":
        return f"{cause}. Then `barrelctl restart {death.process}`"
    return cause


def _about_cause(death: Death) -> str:
    reason, is_model = death.reason, death.process.startswith("model:")
    if death.traceback or reason.startswith("exit status 70"):
        return "this is a bug of Barrel Inference: report it with the traceback above"
    if reason.startswith("hung: one call"):
        return "one step took too long: shorter prompts, more threads, or a larger context_opts.decode_budget_ms"
    if reason.startswith("hung:"):
        return "it did not answer: a machine without time or memory for it, or a larger supervisor.hang_s is needed"
    if reason.startswith("signal SIGKILL"):
        return (
            "it was killed from outside, often by the kernel for lack of memory (`journalctl -k | grep -i oom`): "
            "lower the quotas of the tiers or the model's n_ctx, or allow more memory"
        )
    if reason.startswith("signal SIGILL"):
        return "llama.cpp was built for another processor: reinstall llama-cpp-python on this machine"
    if is_model and reason.startswith(_FROM_LLAMA):
        return (
            f"llama.cpp ended it; its last words are in `barrelctl logs {death.process}`. If one request is the cause, that "
            "request was refused after its third death"
        )
    if death.outcome == "failed" and not death.uptime_s:
        return "it never came to serve; the reason says what is to be changed"
    return f"see `barrelctl logs {death.process}`"


def told(death: Death) -> str:
    """A crash report as it is printed."""
    after = f"died after {duration(death.uptime_s)}" if death.uptime_s else "died at its start"
    allowed = f", {death.deaths} of {death.limit} deaths allowed" if death.outcome == "restarting" else ""
    lines = [f"{death.at[:19].replace('T', ' ')}  {death.process} {after} ({death.outcome}{allowed}): {death.reason}"]
    lines += [f"    {line}" for line in death.traceback.splitlines()[-4:]]
    return "\n".join([*lines, f"    → {advice(death)}"])
