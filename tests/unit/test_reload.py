"""What a new configuration changes at once, and what waits."""

from typing import Any

import pytest

from barrel_inference import config
from barrel_inference.supervisor import reload


def settings(tables: dict[str, Any]) -> config.Settings:
    """Resolved settings of `tables` over the defaults."""
    return config.resolve(config.settings_from(config.lay_over(tables)), runtime_dir="/run/x", state_dir="/var/x")


def plan(old: dict[str, Any], new: dict[str, Any]) -> reload.Plan:
    """The plan from one configuration to the other."""
    return reload.plan(settings(old), settings(new))


def test_nothing_changed() -> None:
    """The same configuration again changes nothing."""
    planned = plan({}, {})
    assert (planned.changed, planned.pending, planned.load) == ((), (), ())
    assert planned.effective == settings({})


@pytest.mark.parametrize(
    ("new", "changed", "pending"),
    [
        ({"log": {"level": "debug"}}, ("log.level",), ()),
        ({"log": {"format": "console"}}, (), ("log.format",)),
        ({"pressure": {"high_watermark": 0.9}}, ("pressure.high_watermark",), ()),
        ({"limits": {"max_requests": 7}}, ("limits.max_requests",), ()),
        ({"tiers": {"ram": {"quota_bytes": "1GiB"}}}, ("tiers.ram.quota_bytes",), ()),
        (
            {
                "tiers": {
                    "disk": {"quota_bytes": "1GiB", "root": "/x"},
                    "cold": {"kind": "disk", "quota_bytes": 1, "root": "/y"},
                }
            },
            ("tiers.disk.quota_bytes",),
            ("tiers.disk.root", "tiers.cold"),
        ),
        ({"models": {"m": {"model_path": "/m.gguf"}}}, ("models.m",), ()),
        ({"cache": {"salt": "x"}, "log": {"level": "error"}}, ("log.level",), ("cache.salt",)),
    ],
)
def test_keys_are_named(new: dict[str, Any], changed: tuple[str, ...], pending: tuple[str, ...]) -> None:
    """Each key that differs is either taken up or said to wait."""
    planned = plan({}, new)
    assert (planned.changed, planned.pending) == (changed, pending)


def test_processes_never_disagree() -> None:
    """What waits keeps its old value for processes that start later, so that all have the same."""
    disk = {"root": "/x", "quota_bytes": 5}
    planned = plan({}, {"cache": {"block_tokens": 64, "salt": "x"}, "log": {"level": "error"}, "tiers": {"disk": disk}})
    assert planned.effective.cache == settings({}).cache
    assert planned.effective.log.level == "error"
    assert planned.effective.tiers["disk"].root == settings({}).tiers["disk"].root
    assert planned.effective.tiers["disk"].quota_bytes == 5


def test_models_that_start_with_the_runtime() -> None:
    """A model that is new to autoload is loaded; one that had it already was perhaps unloaded on purpose."""
    one = {"model_path": "/m.gguf", "autoload": True}
    assert plan({}, {"models": {"m": one, "n": {"model_path": "/n.gguf"}}}).load == ("m",)
    assert plan({"models": {"m": one}}, {"models": {"m": {**one, "tier": "disk"}}}).load == ()
