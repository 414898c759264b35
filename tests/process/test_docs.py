"""Every snippet of README and docs runs as it stands, page by page, in a directory and a runtime of its own."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_RUN = re.compile(r"<!-- not run: [^>]+ -->\n```\w+\n.*?```", re.DOTALL)
RUN_WITH = re.compile(r"<!-- run with: (\w+) -->\n```\w+\n.*?```", re.DOTALL)
SNIPPET = re.compile(r"^```(sh|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DEADLINE_S = 240

# Every line of a shell snippet has to succeed.
SHELL = ["bash", "-euo", "pipefail", "-c"]


def snippets(page: Path) -> list[tuple[str, str]]:
    """Language and text of what is to be run of a page; the commands' own page shows each alone and is checked elsewhere."""
    if page.name == "cli.md":
        return []
    text = RUN_WITH.sub(lambda found: found[0] if shutil.which(found[1]) else "", NOT_RUN.sub("", page.read_text()))
    return [(found[1], found[2]) for found in SNIPPET.finditer(text)]


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Where the commands are on the path and every directory is a new one; a runtime that was left is stopped."""
    base = Path(tempfile.mkdtemp(prefix="bd-", dir="/tmp"))
    names = ("BARREL_ENDPOINT", "BARREL_CURVE", "RUNTIME_DIRECTORY", "STATE_DIRECTORY")
    made = {key: value for key, value in os.environ.items() if key not in names}
    made |= {f"XDG_{name}": str(base / name) for name in ("RUNTIME_DIR", "STATE_HOME", "CONFIG_HOME")}
    made |= {"PATH": f"{Path(sys.executable).parent}:{made['PATH']}", "HOME": str(base)}
    (base / "RUNTIME_DIR").mkdir(mode=0o700)
    yield made
    subprocess.run(["barrelctl", "stop"], env=made, capture_output=True, check=False, timeout=DEADLINE_S)
    shutil.rmtree(base)


@pytest.mark.real
@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=lambda page: page.stem)
def test_snippets_run(page: Path, environment: dict[str, str]) -> None:
    """What the page shows succeeds, in its order."""
    for language, text in snippets(page):
        command = [*SHELL, text] if language == "sh" else [sys.executable, "-P", "-W", "error", "-c", text]
        done = subprocess.run(
            command, env=environment, cwd=environment["HOME"], capture_output=True, text=True, check=False,
            stdin=subprocess.DEVNULL, timeout=DEADLINE_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
