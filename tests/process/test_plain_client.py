"""examples/plain_client.py, which knows nothing but the protocol page, against a runtime."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from barrel_inference import Runtime

PROGRAM = Path(__file__).parents[2] / "examples" / "plain_client.py"
CONFIG = {
    "tiers": {"ram": {"quota_bytes": "64MiB"}, "ram_file": {"enabled": False}, "disk": {"enabled": False}},
    "writer": {"processes": 1},
}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    """A tree with a stub model."""
    with Runtime(CONFIG) as made:
        with made.client() as client:
            client.load_model("x", "tiny", backend="stub", context_opts={"n_ctx": 4096})
        yield made


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """The example as a user runs it."""
    command = [sys.executable, "-I", "-W", "error", str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_imports_nothing_of_ours() -> None:
    """What it needs is in the standard library, pyzmq and msgpack."""
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(PROGRAM.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported - set(sys.stdlib_module_names) == {"msgpack", "zmq"}


def test_same_text_as_our_client(runtime: Runtime) -> None:
    """It streams the text that our own client gets, over more events than the first credit allows."""
    done = run(runtime.endpoint, "tiny", "hello plain world", "100")
    with runtime.client() as client:
        ours = client.complete("tiny", "hello plain world", response_tokens=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ours.reply + "\n"
    assert f"{ours.completion_tokens} tokens" in done.stderr


def test_errors_have_codes(runtime: Runtime) -> None:
    """An unknown model is the error `not_found`, as the page says."""
    done = run(runtime.endpoint, "absent", "hello")
    assert done.returncode == 1
    assert "'not_found'" in done.stderr
