"""The wheel and the source distribution: what is in them, and that a wheel works where there is no checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout's tracked and new files: a build leaves its traces there."""
    target = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (found := ROOT / name).exists() or found.is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(found, target / name, follow_symlinks=False)
    return target


def built(source: Path, target: Path) -> Path:
    """The wheel of a source directory."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(target), str(source)],
        check=True,
    )  # fmt: skip
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel, built without the network."""
    with zipfile.ZipFile(built(source, tmp_path_factory.mktemp("wheel"))) as opened:
        yield opened


def test_top_level_is_one_package(wheel: zipfile.ZipFile) -> None:
    """Nothing but `barrel_inference` can be imported because of us: no `supervisor`, `tiers` or `workers`."""
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"barrel_inference"}


def test_everything_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    """All packages with all their modules, the default configuration, and the mark of a typed package."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    names = set(wheel.namelist())
    for package in packages:
        folder = package.replace(".", "/")
        modules = {f"{folder}/{path.name}" for path in (ROOT / folder).glob("*.py")}
        assert modules
        assert modules <= names
    assert {"barrel_inference/sys.toml", "barrel_inference/py.typed"} <= names
    folders = {path.parent for top in ("supervisor", "tiers", "workers") for path in (ROOT / top).rglob("*.py")}
    assert {f"barrel_inference.{'.'.join(path.relative_to(ROOT).parts)}" for path in folders} <= set(packages)


def test_a_wheel_works_in_a_new_environment(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Installed elsewhere its commands run, and doctor finds nothing broken; only dependencies come from this environment."""
    assert wheel.filename is not None
    new = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(new)], check=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(new / "bin" / "python")]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel.filename], check=True)
    site = next((new / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "run")}

    def run(name: str, *arguments: str) -> str:
        return subprocess.run(
            [str(new / "bin" / name), *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=60,
        ).stdout  # fmt: skip

    where = run("python", "-P", "-c", "import barrel_inference; print(barrel_inference.__file__)")
    assert where == f"{site}/barrel_inference/__init__.py\n"
    assert run("barrelctl", "--version").startswith("barrelctl 0.")
    assert tomllib.loads(run("barrelctl", "config", "show"))["cache"]["block_tokens"] == 256
    assert '"failed"' not in run("barrelctl", "doctor", "--json")
    assert "--config" in run("barreld", "--help")


def test_the_source_distribution_builds_the_same(source: Path, tmp_path: Path, wheel: zipfile.ZipFile) -> None:
    """The sdist holds every file that the wheel is made of."""
    program = f"import setuptools.build_meta as b; print(b.build_sdist({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} <= held


def test_the_image_is_built_from_enough(source: Path, tmp_path: Path, wheel: zipfile.ZipFile) -> None:
    """What .dockerignore lets through makes the same wheel."""
    context = tmp_path / "context"
    context.mkdir()
    for line in (source / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            found = source / line[1:]
            if found.is_dir():
                shutil.copytree(found, context / found.name, symlinks=True)
            else:
                shutil.copy2(found, context)
    with zipfile.ZipFile(built(context, tmp_path)) as made:
        assert sorted(made.namelist()) == sorted(wheel.namelist())
