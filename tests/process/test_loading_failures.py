"""Loads that fail: the reason is told, nothing is left behind, nothing is tried again; and models that would not fit."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from barrel_inference import BadModel, Client, Runtime
from tests.model import tiny_gguf
from tests.process.loads import config, tiny

HUGE = {"n_ctx": 2**31 - 1}


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory, tiny_models: Mapping[str, Path]) -> Iterator[Runtime]:
    """One tree for the module."""
    with Runtime(config(tmp_path_factory.mktemp("failures"), tiny_models["dense"])) as made:
        yield made


@pytest.fixture(scope="module")
def client(runtime: Runtime) -> Iterator[Client]:
    """A client of it."""
    with runtime.client() as made:
        yield made


def _written(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], object]:
    return lambda path, dense: path.write_bytes(change(dense.read_bytes()))


def _kills_at_its_first_decode(path: Path, _dense: Path) -> None:
    """A file that loads, with weights of a type that computing dies of."""
    original = tiny_gguf._weights
    try:
        tiny_gguf._weights = lambda numbers, name, shape: original(numbers, name, shape).astype(
            np.float64 if "ffn_up" in name else np.float32
        )
        tiny_gguf.write_model("dense", path)
    finally:
        tiny_gguf._weights = original


BAD_FILES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "missing": (lambda _path, _dense: None, "No such file"),
    "a link to nowhere": (lambda path, _dense: path.symlink_to("gone.gguf"), "No such file.* link to 'gone.gguf'"),
    "a link to itself": (lambda path, _dense: path.symlink_to(path), "Too many levels of symbolic links"),
    "a pipe": (lambda path, _dense: os.mkfifo(path), "is no regular file"),
    "a directory": (lambda path, _dense: path.mkdir(), "is a directory"),
    "empty": (_written(lambda _data: b""), "is empty"),
    "truncated": (_written(lambda data: data[: len(data) // 2]), "not within the file bounds"),
    "ends in its head": (_written(lambda data: data[:2000]), "failed to read key-value pairs"),
    "text": (_written(lambda _data: b"once upon a time"), "begins with b'once'"),
    "another magic": (_written(lambda data: b"GGML" + data[4:]), "no GGUF file"),
    "an unknown architecture": (
        _written(lambda data: data.replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0llemb", 1)),
        "unknown model architecture: 'llemb'",
    ),
    "deadly": (_kills_at_its_first_decode, "SIGSEGV"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_leaves_nothing(
    client: Client, runtime: Runtime, tmp_path: Path, tiny_models: Any, kind: str
) -> None:
    """The error is bad_model with the reason; no process, row or socket stays, and the id can be used at once."""
    make, reason = BAD_FILES[kind]
    make(tmp_path / "bad.gguf", tiny_models["dense"])
    before = client.counters()["restarts"]
    with pytest.raises(BadModel, match=reason) as refused:
        tiny(client, tmp_path / "bad.gguf", "victim")
    assert not refused.value.retryable
    _nothing_is_left(client, runtime)
    assert client.counters()["restarts"] == before
    client.load_model("any", "victim", backend="stub")
    client.unload("victim")


def test_what_is_no_file_at_all(client: Client, runtime: Runtime) -> None:
    """The root directory has no name, and a NUL ends no path."""
    for path, reason in (("/", "is a directory"), ("/m\0.gguf", "NUL"), ("file:///m%00.gguf", "NUL")):
        with pytest.raises(BadModel, match=reason):
            client.load_model(path, "victim")
        _nothing_is_left(client, runtime)


@pytest.mark.parametrize("key", [b"llama.block_count", b"llama.embedding_length", b"llama.attention.head_count_kv"])
def test_a_head_that_makes_no_sense(client: Client, tmp_path: Path, tiny_models: Any, key: bytes) -> None:
    """Numbers that no model has: the load fails, in the model's process; an estimate is very large, or refused."""
    data = tiny_models["dense"].read_bytes()
    at = data.index(key) + len(key) + 4
    (tmp_path / "odd.gguf").write_bytes(data[:at] + b"\xff\xff\xff\xff" + data[at + 4 :])
    if key == b"llama.block_count":
        with pytest.raises(BadModel, match="makes no sense"):
            client.estimate(tmp_path / "odd.gguf")
    else:
        assert client.estimate(tmp_path / "odd.gguf")["needed"] > 1 << 40
    with pytest.raises(BadModel):
        client.load_model(tmp_path / "odd.gguf", force=True)


def test_a_split_model_that_is_not_whole(client: Client, runtime: Runtime, tmp_path: Path) -> None:
    """A missing part is named, and so is the first part where another was given."""
    tiny_gguf.write_model("dense", tmp_path / "split.gguf", tensors_per_file=10)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    with pytest.raises(BadModel, match=f"load '{parts[0].name}'"):
        tiny(client, parts[-1], "victim")
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/m\xff-00002-of-00002.gguf")
    with pytest.raises(
        BadModel, match="not the first part"
    ):  # what the error names is no text, and is told all the same
        client.load_model(odd, "victim")
    parts[-1].unlink()
    with pytest.raises(BadModel, match=f"{parts[-1].name}.*No such file"):
        tiny(client, parts[0], "victim")
    _nothing_is_left(client, runtime)


def _nothing_is_left(client: Client, runtime: Runtime) -> None:
    assert "victim" not in [model.model_id for model in client.models()]
    assert "model:victim" not in client.processes()
    assert not [path for path in Path(runtime.settings.runtime.dir).iterdir() if "victim" in path.name]


def test_a_process_that_dies_while_it_loads(client: Client, runtime: Runtime) -> None:
    """Its death is the answer, and it is not started again."""
    with pytest.raises(BadModel, match="SIGKILL"):
        client.load_model("any", "victim", backend="stub", model_opts={"crash_at_load": True})
    _nothing_is_left(client, runtime)


def test_what_cannot_fit_is_refused(client: Client, runtime: Runtime, tiny_models: Mapping[str, Path]) -> None:
    """The refusal has what it would take and what is left; force tries it all the same."""
    with pytest.raises(BadModel, match="needs about") as refused:
        tiny(client, tiny_models["dense"], "victim", context_opts=HUGE)
    assert refused.value.details["needed"] > refused.value.details["available"] > 0
    assert "force" in (refused.value.hint or "")
    _nothing_is_left(client, runtime)
    with pytest.raises(BadModel, match="needs about"):
        client.load_model("any", "victim", backend="stub", context_opts=HUGE)
    client.load_model("any", "victim", backend="stub", context_opts=HUGE, force=True)
    client.unload("victim")


def test_an_estimate_loads_nothing_and_is_near_the_truth(client: Client, tiny_models: Mapping[str, Path]) -> None:
    """Weights and cells are what the model then says, the buffers within a half."""
    before = client.processes()
    for kind, path in tiny_models.items():
        wanted = client.estimate(path, context_opts={"n_ctx": 2048})
        assert client.processes() == before
        assert wanted["needed"] <= wanted["available"], kind
        model = client.load_model(path, context_opts={"n_ctx": 2048})
        took = client.model_info(model).memory_bytes
        client.unload(model)
        assert took["weights"] == pytest.approx(wanted["weights"], rel=0.01), kind
        assert took["kv"] == pytest.approx(wanted["kv"], rel=0.05, abs=12_000), kind
        assert took["compute"] == pytest.approx(wanted["compute"], rel=0.5), kind


def test_dry_run_on_the_command_line(runtime: Runtime, client: Client, tiny_models: Mapping[str, Path]) -> None:
    """--dry-run prints the estimate; the exit status says whether it fits, and --force is what the refusal names."""

    def run(*more: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-P", "-m", "barrel_inference.cli.main", "load", str(tiny_models["dense"]), *more]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60,
            env={"BARREL_ENDPOINT": runtime.endpoint, "PATH": ""},
        )  # fmt: skip

    fitting = run("--dry-run", "--json")
    assert (fitting.returncode, json.loads(fitting.stdout)["fits"]) == (0, True)
    too_large = run("--dry-run", "--set", "context_opts.n_ctx=2147483647")
    assert (too_large.returncode, "compute" in too_large.stdout, "--force" in too_large.stderr) == (1, True, True)
    refused = run("--set", "context_opts.n_ctx=2147483647")
    assert (refused.returncode, "force" in refused.stderr) == (1, True)
