"""start, stop, reload, status, ps, restart."""

from pathlib import Path
from typing import Annotated, Any

import typer

from barrel_inference.cli import completion, context, output
from barrel_inference.cli.failure import not_found
from barrel_inference.errors import BarrelError

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Only terminals are asked anyway.")]


def start(
    config: Annotated[Path | None, typer.Option(help="TOML file that is laid over the packaged sys.toml.")] = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay in this terminal; Ctrl-C stops it.")] = False,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One key over the file; may be repeated.")
    ] = None,
) -> None:
    """Start the runtime.

    Example: barrelctl start --set tiers.ram.quota_bytes=8GiB
    """
    from barrel_inference import runtime  # here, so that other commands do not wait for it

    settings = runtime.read_settings(config, sets=sets or ())
    source = runtime.Source(config, tuple(sets or ()))
    if foreground:
        runtime.run_foreground(settings, source=source)
    pid = runtime.start_daemon(settings, source=source)
    output.note(f"the runtime is ready (supervisor pid {pid})")


def stop(
    timeout_s: Annotated[float | None, typer.Option("--timeout", help="Seconds to wait at most.")] = None,
    yes: Yes = False,
) -> None:
    """Stop the runtime, once the models have saved what they hold. Requests under way end; with some, it asks first.

    Example: barrelctl stop
    """
    from barrel_inference import runtime  # as above

    if not yes:
        ask_about_requests("Stop the runtime")
    runtime.stop_daemon(context.runtime_dir(), timeout_s=timeout_s)
    output.note("the runtime has stopped")


def ask_about_requests(what: str, model_id: str | None = None) -> None:
    """Before something that ends requests: ask, if there are any."""
    if not output.can_ask():
        return
    try:
        with context.connected(timeout_s=5.0) as client:
            count = client.queue_depth(model_id)
    except BarrelError:
        return  # what is there to be ended will say so itself
    if count:
        output.confirm(f"{what}? {count} request{'s' if count > 1 else ''} will end.", yes=False)


def reload(as_json: AsJson = False) -> None:
    """Read the configuration again; says what changed, and what waits for a restart of the runtime.

    Live: log.level, [pressure], [limits], [models]. Limits of a model's queue and grammars hold for models loaded from now on.

    Example: barrelctl reload
    """
    from barrel_inference import runtime  # as above
    from barrel_inference.protocol import Reload, Reloaded

    done = runtime.ask_supervisor(context.runtime_dir(), Reload(), Reloaded)
    if as_json:
        output.document({"changed": done.changed, "pending": done.pending})
        return
    output.note(f"changed: {', '.join(done.changed) or 'nothing'}")
    if done.pending:
        output.note(f"waits for `barrelctl stop` and `start`: {', '.join(done.pending)}")


def status(as_json: AsJson = False) -> None:
    """The runtime at a glance: processes, models, cache tiers.

    Example: barrelctl status --json
    """
    with context.connected(timeout_s=10.0) as client:
        found = client.status()
    if as_json:
        output.document(found)
        return
    up = output.duration(found["uptime_s"])
    print(f"Barrel Inference {found['version']}, up {up}, {found['cores']} cores, sockets in {found['runtime_dir']}")
    _process_table(found)
    _model_table(found["models"])
    _tier_table(found["tiers"])
    if (pressure := found["pressure"]) and pressure.get("enabled"):
        print(f"\nmemory pressure: {pressure['ratio']:.0%} of {output.size(pressure['total_bytes'])}")


def _process_table(found: dict[str, Any]) -> None:
    print()
    rows: list[list[object]] = [
        ["supervisor", output.state("ready"), found["supervisor_pid"], 0, output.duration(found["uptime_s"]), ""]
    ]
    for child in found["children"]:
        rows.append(
            [
                child["id"], output.state(child["state"]), child["pid"] or "-", child["restarts"],
                output.duration(child["uptime_s"]), child["reason"] or "",
            ]
        )  # fmt: skip
    output.table(["process", "state", "pid", "restarts", "up", "last exit"], rows, empty="no process")


def _model_table(models: list[dict[str, Any]]) -> None:
    print()
    rows = [
        [
            row["model_id"], output.state(str(row["phase"])), row["backend"], row["running"], row["pending_len"],
            row["context_size"], row["quant_type"], row["tier"], row["threads"] or "-",
            output.size(sum(row["memory_bytes"].values())), row["reason"] or "",
        ]
        for row in models
    ]  # fmt: skip
    columns = [
        "model",
        "phase",
        "backend",
        "running",
        "waiting",
        "context",
        "quant",
        "saves to",
        "threads",
        "memory",
        "reason",
    ]
    output.table(columns, rows, empty="no model is loaded; load one with `barrelctl load MODEL`")


def _tier_table(tiers: list[dict[str, Any]]) -> None:
    print()
    rows = [
        [
            row["server"], output.state("ready" if row["up"] else "failed"), output.size(row["stored_bytes"]),
            output.size(row["quota_bytes"]), row["rows"], row["note"],
        ]
        for row in tiers
    ]  # fmt: skip
    output.table(["tier", "state", "stored", "quota", "rows", "note"], rows, empty="no cache tier is known")


def ps(as_json: AsJson = False) -> None:
    """The runtime's processes, with the memory of each.

    Example: barrelctl ps
    """
    import psutil  # here: it takes 30 ms to import

    with context.connected(timeout_s=10.0) as client:
        found = client.status()
    children = [{"id": "supervisor", "state": "ready", "pid": found["supervisor_pid"], "restarts": 0,
                 "uptime_s": found["uptime_s"]}, *found["children"]]  # fmt: skip
    for child in children:
        try:
            # RSS, not PSS: adding that up walks the page tables and holds up the page faults of a model.
            child["rss_bytes"] = psutil.Process(child["pid"]).memory_info().rss if child["pid"] else 0
        except psutil.NoSuchProcess:
            child["rss_bytes"] = 0
    if as_json:
        output.document(children)
        return
    rows = [
        [
            child["id"], output.state(child["state"]), child["pid"] or "-", child["restarts"],
            output.duration(child["uptime_s"]), output.size(child["rss_bytes"]),
        ]
        for child in children
    ]  # fmt: skip
    output.table(["process", "state", "pid", "restarts", "up", "memory"], rows, empty="no process")


def restart(
    process: Annotated[
        str, typer.Argument(help="Id of a process as `barrelctl ps` lists it.", autocompletion=completion.process_ids)
    ],
) -> None:
    """Stop one process and start it again; returns when it is ready.

    Example: barrelctl restart index
    """
    with context.connected() as client:
        known = [name for name in client.processes() if name != "supervisor"]
        if process not in known:
            raise not_found("process", process, known, f"there are {', '.join(known)}")
        client.restart(process)
    output.note(f"{process} is ready again")
