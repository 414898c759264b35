"""The child specifications of a configuration."""

import subprocess
import sys

import pytest

from barrel_inference import config
from barrel_inference.protocol import ChildSpec
from barrel_inference.supervisor import spec


def tree(*sets: str) -> list[ChildSpec]:
    """The children of the default configuration with `sets` over it."""
    tables = config.lay_over(config.apply_sets({}, sets))
    return spec.tree_of(config.resolve(config.settings_from(tables), state_dir="/s", runtime_dir="/r"))


def test_default_tree_in_start_order() -> None:
    """Who serves others starts before them; stop order is the reverse."""
    assert [child.id for child in tree()] == [
        "router", "tier:ram", "tier:ram_file", "tier:disk", "index", "writer:0", "writer:1", "pressure",
    ]  # fmt: skip


def test_a_tier_that_is_switched_off_is_not_started() -> None:
    """Only enabled tiers run, further ones included."""
    ids = [child.id for child in tree(
        "tiers.disk.enabled=false", 'tiers.archive={kind="disk", quota_bytes=1, root="/a"}'
    )]  # fmt: skip
    assert "tier:disk" not in ids
    assert "tier:archive" in ids


def test_autoload_starts_a_model_with_its_options() -> None:
    """A model with `autoload` is a child of its own kind; one without waits to be loaded."""
    child = tree(
        'models.tiny={model_path="/x.gguf", autoload=true, context_opts={n_ctx=64}}', 'models.other={model_path="/y"}',
        "cache.evict_save_timeout_ms=7000",
    )[-1]  # fmt: skip
    assert (child.id, child.group, child.restart) == ("model:tiny", "model", "transient")
    options = {"model_path": "/x.gguf", "context_opts": {"n_ctx": 64}}
    assert child.boot == {"model_id": "tiny", "options": options}
    assert child.shutdown_ms > 7000, "a stop leaves time for the shutdown save"


def test_every_child_of_ours_is_valid() -> None:
    """What the supervisor builds itself passes the check that it makes on others' specifications."""
    children = tree('models.tiny={model_path="/x", autoload=true}')
    assert [problem for child in children for problem in spec.problems(child)] == []
    assert spec.duplicate_ids(children) == []


@pytest.mark.parametrize(
    "child",
    [
        ChildSpec(id="../x", module="m"), ChildSpec(id="a/b", module="m"), ChildSpec(id="supervisor", module="m"),
        ChildSpec(id="a\n", module="m"), ChildSpec(id="a", module="m", restart="often"),
        ChildSpec(id="a", module="m", group="cat"), ChildSpec(id="a", module="m", niceness=99),
    ],
)  # fmt: skip
def test_bad_specifications(child: ChildSpec) -> None:
    """A specification from outside cannot name a file elsewhere, or ask for what does not exist."""
    assert spec.problems(child)


def test_the_supervisor_is_light() -> None:
    """The supervisor's process imports no model library, no numpy, and none of the modules that it starts."""
    code = "import sys, barrel_inference.supervisor.root; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {"llama_cpp", "numpy"}.isdisjoint(found)
    assert {child.module for child in tree()}.isdisjoint(found)
