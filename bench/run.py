"""The whole run: every scenario in turns with its floor and its peer, then results, table and plots.

python bench/run.py [--quick] [--no-peer] [--only NAME ...]
"""

import argparse
import json
import os
import platform
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import peer
import report
import scenarios
from scenarios import MODEL, Bench
from workload import N_CTX

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Where this ran."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.processor(), "cores": os.cpu_count(), "kernel": platform.release(),
        "python": platform.python_version(), "llama_cpp_python": version("llama-cpp-python"),
        "pyzmq": version("pyzmq"), "model": MODEL, "n_ctx": N_CTX, "load_1m": os.getloadavg()[0],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


SCENARIOS = (
    "first_tokens", "own_caches", "restart", "decode", "saving", "pause", "herd", "chat", "misses", "two_models",
    "loading", "metrics", "control", "many_streams",
)  # fmt: skip


SLOW = frozenset({"own_caches", "chat", "metrics"})  # not in the quick mode


def main() -> None:
    """Run, write, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions; the peer only if it is built")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--only", nargs="*", choices=SCENARIOS)
    given = parser.parse_args()
    server = None if given.no_peer else peer.find()
    if server is None and not given.quick and not given.no_peer:
        print("building llama-server (6 minutes and more) ...", flush=True)
        server = peer.build()
    about = machine()
    bench = Bench(quick=given.quick, server=server)
    results = RESULTS / "quick" if given.quick else RESULTS
    results.mkdir(parents=True, exist_ok=True)
    table = ""
    for name in given.only or [name for name in SCENARIOS if not (given.quick and name in SLOW)]:
        print(f"{name} ... ", end="", flush=True)
        began_s = time.monotonic()
        getattr(bench, name)()
        print(f"{time.monotonic() - began_s:.0f} s", flush=True)
        result = {
            "machine": about | {"load_1m_end": os.getloadavg()[0]}, "quick": given.quick,
            "cells": {cell: {who: s.summary() for who, s in row.items()} for cell, row in bench.cells.items()},
        }  # fmt: skip
        (results / "latest.json").write_text(json.dumps(result, indent=1))
        table = report.write(results, result)
    print(table)
    scenarios.close()


if __name__ == "__main__":
    main()
