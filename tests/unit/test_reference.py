"""The reference pages that follow from the code are as the code is."""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from barrel_inference.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """docs/generate.py, which is no package's module."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current(generator: ModuleType) -> None:
    """`python docs/generate.py` would change nothing."""
    stale = [path.name for path, text in generator.pages().items() if path.read_text() != text]
    assert stale == [], "run python docs/generate.py"


def test_every_event_is_listed() -> None:
    """Each log event in the code is on the page of events."""
    page = (DOCS / "reference" / "events.md").read_text()
    sources = [
        path
        for top in ("barrel_inference", "supervisor", "tiers", "workers")
        for path in (DOCS.parent / top).rglob("*.py")
    ]
    pattern = r"""log\.(?:debug|info|warning|error|critical)\(\s*"([a-z_.]+)\""""
    named = {name for path in sources for name in re.findall(pattern, path.read_text())}
    assert named
    assert {name for name in named if f"`{name}`" not in page} == set()


def test_every_page_is_in_the_navigation() -> None:
    """A page that is not in mkdocs.yml would be found by nobody."""
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert {page for page in pages if f"- {page}\n" not in navigation} == set()


def test_links_lead_somewhere() -> None:
    """Every relative link of README, SECURITY.md and docs names a file that is there."""
    root = DOCS.parent
    for page in (root / "README.md", root / "SECURITY.md", *DOCS.rglob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_examples_of_help_name_real_options(capsys: pytest.CaptureFixture[str]) -> None:
    """The example of every command names a command that exists, and only options that it has."""
    page = (DOCS / "reference" / "cli.md").read_text()
    examples = re.findall(r"```sh\n(barrelctl .*)\n```", page)
    sections = re.findall(r"^## `(barrelctl [^`]+)`$", page, re.MULTILINE)
    assert len(examples) == len(sections), "every command has an example"
    for section, example in zip(sections, examples, strict=True):
        assert re.split(r"\||;", example)[-1].strip().startswith(section) or section in example
        words = shlex.split(section)[1:]
        assert main([*words, "--help"]) == 0
        text = capsys.readouterr().out
        options = [word.partition("=")[0] for word in shlex.split(example) if re.fullmatch(r"--[a-z-]+(=.*)?", word)]
        assert [option for option in options if option not in text] == [], example
