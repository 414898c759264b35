"""The configuration: text laid over the packaged sys.toml, checked whole, as frozen settings. Pure but for the package's own file.

    tables = lay_over(parse(text))          # nested dicts: the packaged defaults with the user's keys on top
    settings = settings_from(tables)        # typed and frozen, or `InvalidArgument` that lists every problem
    settings = resolve(settings)            # every directory absolute
    dump(settings)                          # plain data for a child's boot document

Reading order: the structs (one per table, fields named as in sys.toml), then the functions above.
"""

import hashlib
import importlib.resources
import json
import math
import os
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import tomli_w

from barrel_inference import config_check
from barrel_inference.config_check import ByteSize, TokenLimit
from barrel_inference.errors import InvalidArgument
from barrel_inference.protocol import Tier

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(gt=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]

PolicyCheck = Callable[[Mapping[str, Any]], list[str]]


class RuntimeSettings(msgspec.Struct, frozen=True):
    """`[runtime]`: where sockets and state lie, and who may connect."""

    dir: str
    state_dir: str
    log_dir: str
    endpoint: str
    socket_group: str
    tcp: str
    curve: str


class SupervisorSettings(msgspec.Struct, frozen=True):
    """`[supervisor]`: how many restarts are too many."""

    intensity: Count
    period_s: Annotated[float, msgspec.Meta(gt=0)]
    model_intensity: Count
    model_period_s: Annotated[float, msgspec.Meta(gt=0)]
    backoff_max_s: Seconds
    hang_s: Annotated[float, msgspec.Meta(ge=3)]  # a beat comes every 2 s


class PolicySettings(msgspec.Struct, frozen=True):
    """`[cache.policy]`: the gates of a save. Absent optional keys follow others, see sys.toml."""

    min_tokens: TokenLimit
    cold_min_tokens: TokenLimit
    cold_max_tokens: TokenLimit
    continued_interval: TokenLimit
    boundary_trim_tokens: Count
    boundary_align_tokens: Positive
    store_logits: bool
    min_reuse_tokens: TokenLimit | None = None
    prefill_chunk_size: TokenLimit | None = None


class CacheSettings(msgspec.Struct, frozen=True):
    """`[cache]`."""

    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    salt: str
    evict_save_timeout_ms: Count
    session_resume_wait_ms: Count
    fingerprint_mode: Literal["safe", "gguf_chunked", "fast_unsafe"]
    policy: PolicySettings


class TierSettings(msgspec.Struct, frozen=True):
    """One `[tiers.NAME]`. `root` is empty for a tier in memory."""

    kind: Literal["ram", "ram_file", "disk"]
    enabled: bool
    quota_bytes: ByteSize
    root: str


class WriterSettings(msgspec.Struct, frozen=True):
    """`[writer]`: the save pool of the file tiers."""

    processes: Annotated[int, msgspec.Meta(ge=1, le=64)]
    staging_bytes: ByteSize


class PressureSettings(msgspec.Struct, frozen=True):
    """`[pressure]`: when the poller evicts."""

    enabled: bool
    pressure_source: Annotated[str, msgspec.Meta(pattern=r"^(noop|system|nvidia_smi|module:[A-Za-z_][\w.]*)$")]
    interval_ms: Positive
    high_watermark: Share
    low_watermark: Share
    min_evict_bytes: ByteSize
    evict_tiers: list[str]
    unload_models_under_pressure: bool


class LimitSettings(msgspec.Struct, frozen=True):
    """`[limits]`: above them a request is refused."""

    max_requests_per_client: Positive
    max_requests: Positive
    max_queue_per_model: Positive
    grammar_bytes: Positive
    model_roots: list[str]


class LogSettings(msgspec.Struct, frozen=True):
    """`[log]`."""

    level: Literal["debug", "info", "warning", "error"]
    format: Literal["auto", "json", "console"]


class MetricsSettings(msgspec.Struct, frozen=True):
    """`[metrics]`: the router's page for Prometheus."""

    listen: str


class Settings(msgspec.Struct, frozen=True):
    """The whole configuration, checked. `models` are options of load_model by name, plus `autoload`."""

    runtime: RuntimeSettings
    supervisor: SupervisorSettings
    cache: CacheSettings
    tiers: dict[str, TierSettings]
    writer: WriterSettings
    pressure: PressureSettings
    limits: LimitSettings
    log: LogSettings
    metrics: MetricsSettings
    models: dict[str, dict[str, Any]]


# --- from text to settings ------------------------------------------------------------------------------------------


def defaults_text() -> str:
    """The packaged sys.toml."""
    return importlib.resources.files("barrel_inference").joinpath("sys.toml").read_text("utf-8")


def parse(text: str, *, name: str = "configuration") -> dict[str, Any]:
    """TOML as nested dicts, or `InvalidArgument` with the line."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as bad:
        raise InvalidArgument(f"{name} is not TOML: {bad}") from None


def lay_over(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The packaged defaults with `tables` on top, key by key."""
    return merge(parse(defaults_text(), name="sys.toml"), tables)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `over` laid on top; tables are merged, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def apply_sets(tables: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """`tables` with each `KEY=VALUE` laid on top. The value is TOML if it reads as TOML, else text."""
    result = dict(tables)
    for assignment in assignments:
        key, separator, value = assignment.partition("=")
        if not separator or not key.strip() or "\n" in assignment:
            raise InvalidArgument(f"--set {assignment!r} is not KEY=VALUE", hint="for example log.level=debug")
        result = merge(result, _assigned(key.strip(), value.strip()))
    return result


def _assigned(key: str, value: str) -> dict[str, Any]:
    try:
        return tomllib.loads(f"{key} = {value}")
    except tomllib.TOMLDecodeError:
        # JSON text is a TOML basic string, except that TOML has no surrogate escapes: keep characters as they are.
        return parse(f"{key} = {json.dumps(value, ensure_ascii=False)}", name=f"--set {key}")


def settings_from(tables: Mapping[str, Any], *, check_policy: PolicyCheck | None = None) -> Settings:
    """Typed settings, or `InvalidArgument` that lists every problem with its dotted key and value.

    Args:
        tables: the complete configuration, as `lay_over` gives it.
        check_policy: says what is wrong with a merged policy, as "policy.KEY ..." (tiers.policy.validate).
    """
    tables = _with_tier_defaults(tables)
    values, problems = config_check.check_struct(tables, Settings)
    problems += config_check.check_models(tables.get("models"))
    if not problems:
        settings = msgspec.convert(values, Settings)
        problems = config_check.check_together(settings)
        if check_policy:
            problems += _policy_problems(settings, check_policy)
        if not problems:
            return settings
    count = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
    raise InvalidArgument("\n  ".join([f"the configuration has {count}:", *problems]), problems=problems)


def _with_tier_defaults(tables: Mapping[str, Any]) -> dict[str, Any]:
    """A tier's table with the keys that its name and kind imply."""
    tiers = tables.get("tiers")
    result = {"models": {}, **tables}
    if isinstance(tiers, Mapping):
        result["tiers"] = {
            name: {"enabled": True, "root": "", **({"kind": name} if name in set(Tier) else {}), **tier}
            if isinstance(tier, Mapping)
            else tier
            for name, tier in tiers.items()
        }
    return result


def _policy_problems(settings: Settings, check_policy: PolicyCheck) -> list[str]:
    policy = {k: v for k, v in msgspec.to_builtins(settings.cache.policy).items() if v is not None}
    problems = [f"cache.{problem}" for problem in check_policy(policy)]
    for name, options in settings.models.items():
        if own := options.get("policy"):
            problems += [f"models.{name}.{problem}" for problem in check_policy({**policy, **own})]
    return problems


# --- from settings to what processes use ------------------------------------------------------------------------------


def default_runtime_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Where a user's runtime keeps its sockets when nothing is configured."""
    if systemd := environment.get("RUNTIME_DIRECTORY"):
        return Path(systemd.split(":")[0])
    if xdg := environment.get("XDG_RUNTIME_DIR"):
        return Path(xdg) / "barrel-inference"
    return Path(tempfile.gettempdir()) / f"barrel-inference-{os.getuid()}"


def default_state_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Where a user's runtime keeps its disk tier when nothing is configured."""
    if systemd := environment.get("STATE_DIRECTORY"):
        return Path(systemd.split(":")[0])
    if xdg := environment.get("XDG_STATE_HOME"):
        return Path(xdg) / "barrel-inference"
    return Path("~/.local/state/barrel-inference").expanduser()


def default_log_dir(state_dir: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """Where the logs go when nothing is configured."""
    if systemd := environment.get("LOGS_DIRECTORY"):
        return Path(systemd.split(":")[0])
    return state_dir / "log"


def resolve(
    settings: Settings,
    *,
    state_dir: str | Path | None = None,
    runtime_dir: str | Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Settings:
    """The settings with every directory filled in and absolute; the arguments win over what is configured."""
    runtime = Path(_absolute(runtime_dir or settings.runtime.dir or default_runtime_dir(environment)))
    state = Path(_absolute(state_dir or settings.runtime.state_dir or default_state_dir(environment)))
    # A private runtime's logs go with its state, whatever service the program is that it belongs to.
    default_log = state / "log" if state_dir else default_log_dir(state, environment)
    log = _absolute(settings.runtime.log_dir or default_log)
    return msgspec.structs.replace(
        settings,
        runtime=msgspec.structs.replace(
            settings.runtime,
            dir=str(runtime),
            state_dir=str(state),
            log_dir=log,
            endpoint=settings.runtime.endpoint or f"ipc://{runtime / 'router'}",
            curve=_absolute(settings.runtime.curve) if settings.runtime.curve else "",
        ),
        metrics=MetricsSettings(_resolve_listen(settings.metrics.listen)),
        tiers={name: _resolve_tier(tier, state) for name, tier in settings.tiers.items()},
        models={name: _resolve_model(options) for name, options in settings.models.items()},
    )


def ram_file_root(state_dir: Path) -> Path:
    """The default root of the `ram_file` tier: its own for each state directory, so that two runtimes never share one."""
    digest = hashlib.sha256(os.fsencode(os.path.realpath(state_dir))).hexdigest()[:12]
    return Path(f"/dev/shm/barrel-inference-{os.getuid()}-{digest}")


def _resolve_tier(tier: TierSettings, state_dir: Path) -> TierSettings:
    if tier.root:
        root = _absolute(tier.root)
    else:
        root = {"ram": "", "ram_file": str(ram_file_root(state_dir)), "disk": str(state_dir / "kvc")}[tier.kind]
    return msgspec.structs.replace(tier, root=root)


def _resolve_listen(listen: str) -> str:
    return f"unix:{_absolute(listen.removeprefix('unix:'))}" if listen.startswith("unix:") else listen


def _resolve_model(options: dict[str, Any]) -> dict[str, Any]:
    path, found = options["model_path"], dict(options)
    if options.get("backend", "llama") != "stub" and not path.startswith(("pkg:", "file:///")):
        found["model_path"] = _absolute(path)
    if "adapters" in options:
        found["adapters"] = [
            [adapter if adapter.startswith("file:///") else _absolute(adapter), scale]
            for adapter, scale in options["adapters"]
        ]
    return found


def _absolute(path: str | Path) -> str:
    return os.path.abspath(Path(path).expanduser())


def dump(settings: Settings) -> dict[str, Any]:
    """The settings as plain data for boot documents. None is infinity, which JSON lacks; an absent key is absent."""
    plain = _without_infinity(_without_absent(msgspec.to_builtins(settings)))
    assert isinstance(plain, dict)
    return plain


def _without_infinity(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinity(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_infinity(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def to_toml(settings: Settings) -> str:
    """TOML that gives the same settings again; keys that follow others are left out."""
    return tomli_w.dumps(_without_absent(msgspec.to_builtins(settings)))


def _without_absent(table: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_absent(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if value is not None
    }
