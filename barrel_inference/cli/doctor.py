"""doctor: is everything there that a runtime needs, and how did things die lately?"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from barrel_inference.cli import context, crashes, output
from barrel_inference.cli.lifecycle import AsJson
from barrel_inference.cli.logs import Tail, log_dir
from barrel_inference.errors import BarrelError, NoRuntime, NotSupported
from barrel_inference.workers.model.cores import usable_cores

_PACKAGES = ("llama-cpp-python", "pyzmq", "msgspec", "structlog", "xxhash")
_KEPT_REPORTS = 5

# A disk tier with less room than this will drop saves soon.
_LOW_DISK_BYTES = 1 << 30

# Loading the library takes a second; one that hangs or kills its process must not take the doctor along.
_LLAMA_TIMEOUT_S = 60.0
_ASK_LLAMA = "import llama_cpp; print(llama_cpp.llama_print_system_info().decode())"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: str  # ok, warning, failed
    text: str


def doctor(as_json: AsJson = False) -> None:
    """Look at Python, llama.cpp, directories, the runtime, and the last crashes. Exit code 1 if something is broken.

    Example: barrelctl doctor
    """
    places, of_runtime = _runtime()
    findings = [*_software(), *places, *of_runtime]
    reports = _crash_reports()
    if as_json:
        rows = [{"name": item.name, "state": item.state, "text": item.text} for item in findings]
        deaths = [{**asdict(report), "advice": crashes.advice(report)} for report in reports]
        output.document({"findings": rows, "crash_reports": deaths})
    else:
        output.table(["what", "state", "found"], [[i.name, output.state(i.state), i.text] for i in findings], empty="")
        print("\nlast crash reports:" if reports else "\nno crash report")
        for report in reports:
            print(crashes.told(report))
    if any(item.state == "failed" for item in findings):
        raise typer.Exit(1)


def _software() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Finding("system", "ok", f"{platform.system()} {platform.release()}, {usable_cores()} usable cores")
    for name in _PACKAGES:
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "failed", f"is not installed — pip install {name}")
    yield _llama()


def _llama() -> Finding:
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_LLAMA],
            capture_output=True,
            text=True,
            timeout=_LLAMA_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding("llama.cpp", "failed", f"does not load within {_LLAMA_TIMEOUT_S:g} s")
    if asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("llama.cpp", "failed", f"does not load ({asked.returncode}): {last}")
    on = [part.strip().removesuffix(" = 1") for part in asked.stdout.split("|") if part.strip().endswith("= 1")]
    return Finding("llama.cpp", "ok", f"loads; {', '.join(on)}")


def _places() -> Iterator[Finding]:
    """The directories that a runtime of this user would use."""
    from barrel_inference import config, runtime  # here, so that other commands do not wait for them

    settings = config.resolve(runtime.read_settings())
    yield _directory("runtime directory", context.runtime_dir(), is_private=True)
    yield _directory("state directory", Path(settings.runtime.state_dir), is_private=False)
    shm = shutil.disk_usage("/dev/shm")
    text = f"{output.size(shm.free)} free of {output.size(shm.total)}"
    is_small = shm.total < settings.tiers["ram_file"].quota_bytes
    hint = "; the ram_file tier will lower its quota (Docker: --shm-size)" if is_small else ""
    yield Finding("/dev/shm", "warning" if is_small else "ok", text + hint)


def _directory(name: str, path: Path, *, is_private: bool) -> Finding:
    try:
        found = path.stat()
    except FileNotFoundError:
        return Finding(name, "ok", f"{path} (will be made)")
    except OSError as bad:
        return Finding(name, "failed", f"{path}: {bad.strerror}")
    if found.st_uid != os.getuid() and os.getuid() != 0:
        return Finding(name, "failed", f"{path} belongs to uid {found.st_uid}, not to {os.getuid()}")
    if is_private and found.st_mode & 0o077:
        return Finding(name, "warning", f"{path} is open to others (mode {found.st_mode & 0o777:o}) — chmod 700")
    return _room(name, path)


def _room(name: str, path: Path) -> Finding:
    free_bytes = shutil.disk_usage(path).free
    state = "warning" if free_bytes < _LOW_DISK_BYTES else "ok"
    return Finding(name, state, f"{path}, {output.size(free_bytes)} free")


def _runtime() -> tuple[list[Finding], list[Finding]]:
    """The directories, and what is to be said about the running runtime's processes."""
    try:
        with context.connected(timeout_s=5.0) as client:
            found = client.status()
    except NoRuntime as absent:
        return [*_places()], [Finding("runtime", "warning", str(absent))]
    except NotSupported:  # it is another user's, and lets us in
        return [], [Finding("runtime", "ok", "answers; the rest of it is for the user who runs it to see")]
    except BarrelError as bad:
        return [*_places()], [Finding("runtime", "failed", str(bad))]
    # It has both of them in its hands: whose they are was its own concern.
    places = [
        _room("runtime directory", Path(found["runtime_dir"])),
        _room("state directory", Path(found["state_dir"])),
    ]
    return places, [
        Finding("runtime", "ok", f"version {found['version']}, up {output.duration(found['uptime_s'])}"),
        *(_process(child) for child in found["children"]),
        *(Finding(tier["server"], "warning", tier["note"]) for tier in found["tiers"] if tier["note"]),
    ]


def _process(child: dict[str, Any]) -> Finding:
    restarts = f", {child['restarts']} restarts, last: {child['reason']}" if child["restarts"] else ""
    if child["state"] == "failed":
        return Finding(child["id"], "failed", child["reason"] or "failed")
    is_well = child["state"] == "ready" and not child["restarts"]
    return Finding(child["id"], "ok" if is_well else "warning", f"{child['state']}{restarts}")


def _crash_reports() -> list[crashes.Death]:
    """The last deaths that nobody asked for."""
    try:
        directory = log_dir(None)
    except BarrelError:
        return []
    others = (line for path in directory.glob("*.log") if path.stem != "supervisor" for line in Tail(path).read())
    return crashes.found(Tail(directory / "supervisor.log").read(), others)[-_KEPT_REPORTS:]
