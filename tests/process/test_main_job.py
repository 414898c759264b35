"""The main job: what `make demo` shows, and what must hold around it."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from barrel_inference import Runtime

ROOT = Path(__file__).parents[2]
DEMO_DEADLINE_S = 300


@pytest.mark.real
@pytest.mark.usefixtures("smollm2")
def test_demo() -> None:
    """The demo shows everything that it promises, and exits 0."""
    done = subprocess.run(
        [sys.executable, "-P", "examples/demo.py"], cwd=ROOT, capture_output=True, text=True, timeout=DEMO_DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "did not happen" not in done.stdout
    assert len(done.stdout.splitlines()) <= 25


def test_helpers_load_neither_llama_nor_numpy() -> None:
    """No helper process has llama.cpp or numpy in its memory; a stub model has neither as well."""
    with Runtime() as runtime:
        with runtime.client() as client:
            client.load_model("none", "stub", backend="stub")
        for name, pid in runtime.processes().items():
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "libllama" not in maps, name
            assert "numpy" not in maps, name


def test_import_is_light() -> None:
    """Importing the package loads no llama.cpp, no numpy, no command line, and opens nothing."""
    code = (
        "import sys, barrel_inference; from barrel_inference import Client, Runtime; "
        "print(sorted({'llama_cpp', 'numpy', 'typer', 'rich', 'structlog'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_script_that_dies_leaves_nothing(number: signal.Signals) -> None:
    """A script with a private runtime that is interrupted, ended or killed leaves no process and no directory."""
    code = (
        "import sys\n"
        "from barrel_inference import Runtime\n"
        "with Runtime() as runtime:\n"
        "    runtime.client().load_model('none', 'stub', backend='stub')\n"
        "    print(*runtime.processes().values(), runtime.runtime_dir, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    script = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with script:
        assert script.stdout is not None
        *pids, runtime_dir = script.stdout.readline().split()
        descriptors = [os.pidfd_open(int(pid)) for pid in pids]
        script.send_signal(number)
        script.wait(30)
    for descriptor in descriptors:
        poll = select.poll()
        poll.register(descriptor)
        assert poll.poll(30_000), "a process is left"
        os.close(descriptor)
    assert not Path(runtime_dir).exists()
