"""What is wrong with a configuration, all of it at once. Pure.

Each function returns problems as lines of "dotted key = value: what it should be"; an empty list means none. `check_struct`
walks a settings struct field by field, so that one bad value does not hide the next.
"""

import difflib
import math
import re
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from barrel_inference.errors import InvalidArgument

if TYPE_CHECKING:
    from barrel_inference.config import Settings

# A number of bytes; in a file also text such as "4GiB".
ByteSize = Annotated[int, msgspec.Meta(ge=0, title="byte size")]
# A number of tokens, or inf.
TokenLimit = Annotated[int | float, msgspec.Meta(title="tokens or inf")]

_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40} | {
    f"{letter}{tail}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for tail, base in (("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)

# Names become socket names `<kind>:<name>` in the runtime directory.
NAME = re.compile(r"[A-Za-z0-9_][\w.+-]*")

# The options of load_model that sys.toml may give, with the type of each.
MODEL_OPTIONS: dict[str, Any] = {
    "autoload": bool,
    "backend": typing.Literal["llama", "stub"],
    "model_path": Annotated[str, msgspec.Meta(min_length=1)],
    "model_opts": dict[str, Any],
    "context_opts": dict[str, Any],
    "fingerprint": Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")],
    "fingerprint_mode": typing.Literal["safe", "gguf_chunked", "fast_unsafe"],
    "quant_type": str,
    "quant_bits": Annotated[int, msgspec.Meta(gt=0)],
    "ctx_params_hash": Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")],
    "context_size": Annotated[int, msgspec.Meta(gt=0)],
    "tier": typing.Literal["ram", "ram_file", "disk"],
    "tier_srv": str,
    "policy": dict[str, Any],
    "adapters": list[tuple[str, float]],
    "thinking_markers": Any,
    "tool_call_markers": Any,
}


def byte_size(value: object) -> int:
    """The number of bytes of `4096`, `"4GiB"` or `"1.5 GB"`, or `InvalidArgument`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise InvalidArgument(f"{value!r} is not a byte size", hint='use a number, or text such as "4GiB"')
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def check_struct(table: object, struct: type[msgspec.Struct], path: str = "") -> tuple[dict[str, Any], list[str]]:
    """The values of `struct`'s fields found in `table`, and what is wrong with them."""
    if not isinstance(table, Mapping):
        return {}, [f"{path} = {table!r}: expected a table"]
    hints = typing.get_type_hints(struct, include_extras=True)
    prefix = f"{path}." if path else ""
    problems = [unknown_key(prefix, key, hints) for key in table if key not in hints]
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(struct):
        if field.name in table:
            values[field.name], found = _check_value(table[field.name], hints[field.name], prefix + field.name)
            problems += found
        elif field.required:
            problems.append(f"{prefix}{field.name}: is missing")
    return values, problems


def _check_value(value: object, hint: Any, path: str) -> tuple[Any, list[str]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return check_struct(value, hint, path)
    inner = typing.get_args(hint)[-1] if typing.get_origin(hint) is dict else None
    if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
        return _check_named(value, inner, path)
    return check_leaf(value, hint, path)


def _check_named(table: object, struct: type[msgspec.Struct], path: str) -> tuple[dict[str, Any], list[str]]:
    """A table of tables, each with a name that the user chose."""
    if not isinstance(table, Mapping):
        return {}, [f"{path} = {table!r}: expected a table"]
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, inner in table.items():
        if not NAME.fullmatch(name):
            problems.append(f"{path}.{name}: a name has letters, digits and _ . + - only")
        values[name], found = check_struct(inner, struct, f"{path}.{name}")
        problems += found
    return values, problems


def check_leaf(value: object, hint: Any, path: str) -> tuple[Any, list[str]]:
    """One value as its type, and what is wrong with it."""
    # A union with None is an optional key; one that is present has to be of the other type.
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    if type(None) in typing.get_args(hint):
        hint = options[0]
    if typing.get_origin(hint) is typing.Literal and value not in options:
        return None, [f"{path} = {value!r}: expected one of {', '.join(map(str, options))}"]
    try:
        if hint == ByteSize:
            return byte_size(value), []
        if hint == TokenLimit:
            return _token_limit(value), []
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidArgument("infinity is not allowed here")
        return msgspec.convert(value, hint, strict=True), []
    except InvalidArgument as bad:
        return None, [f"{path} = {value!r}: {bad.hint or bad.message}"]
    except msgspec.ValidationError as bad:
        return None, [f"{path} = {value!r}: {str(bad)[:1].lower()}{str(bad)[1:]}"]


def _token_limit(value: object) -> float:
    """A whole number of tokens, kept an int, or inf."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if value == math.inf:
        return math.inf
    raise InvalidArgument("expected a number of tokens >= 0, or inf")


def unknown_key(prefix: str, key: str, known: Iterable[str]) -> str:
    """The problem of a key that nobody reads, with the one that was probably meant."""
    close = difflib.get_close_matches(key, list(known), n=1)
    return f"{prefix}{key}: unknown key" + (f", did you mean {prefix}{close[0]}?" if close else "")


def check_models(models: object) -> list[str]:
    """What is wrong with `[models.NAME]`, as far as it can be told without the model."""
    if models is None:
        return []
    if not isinstance(models, Mapping):
        return [f"models = {models!r}: expected a table of tables"]
    problems: list[str] = []
    for name, options in models.items():
        path = f"models.{name}"
        if not NAME.fullmatch(name):
            problems.append(f"{path}: a name has letters, digits and _ . + - only")
        if not isinstance(options, Mapping):
            problems.append(f"{path} = {options!r}: expected a table")
            continue
        for key, value in options.items():
            if key not in MODEL_OPTIONS:
                problems.append(unknown_key(f"{path}.", key, MODEL_OPTIONS))
            elif MODEL_OPTIONS[key] is not Any:
                problems += check_leaf(value, MODEL_OPTIONS[key], f"{path}.{key}")[1]
        if "model_path" not in options:
            problems.append(f"{path}.model_path: is missing")
    return problems


def check_together(settings: "Settings") -> list[str]:
    """What is wrong with values that are each fine alone."""
    return [*_check_tiers(settings), *_check_pressure(settings), *_check_endpoints(settings), *_check_metrics(settings)]


def _check_tiers(settings: "Settings") -> list[str]:
    problems = []
    owners: dict[str, str] = {}
    for name, tier in settings.tiers.items():
        path = f"tiers.{name}"
        is_standard = name in ("ram", "ram_file", "disk")
        if is_standard and tier.kind != name:
            problems.append(f"{path}.kind = {tier.kind!r}: this tier is of kind {name!r}")
        if tier.kind == "ram" and tier.root:
            problems.append(f"{path}.root = {tier.root!r}: a tier in memory has no root")
        if tier.kind != "ram" and not is_standard and not tier.root:
            problems.append(f"{path}.root = '': a further {tier.kind} tier needs a root of its own")
        if tier.root and owners.setdefault(tier.root.rstrip("/"), path) != path:
            problems.append(f"{path}.root = {tier.root!r}: {owners[tier.root.rstrip('/')]} has the same root")
    return problems


def _check_pressure(settings: "Settings") -> list[str]:
    pressure = settings.pressure
    problems = []
    if pressure.low_watermark > pressure.high_watermark:
        problems.append(
            f"pressure.low_watermark = {pressure.low_watermark}: "
            f"is above pressure.high_watermark = {pressure.high_watermark}"
        )
    problems += [
        f"pressure.evict_tiers = {pressure.evict_tiers}: there is no tier {name!r}"
        for name in pressure.evict_tiers
        if name not in settings.tiers
    ]
    return problems


def _check_endpoints(settings: "Settings") -> list[str]:
    runtime = settings.runtime
    problems = []
    if runtime.tcp and not re.fullmatch(r"tcp://[^\s/]+:\d+", runtime.tcp):
        problems.append(f"runtime.tcp = {runtime.tcp!r}: expected tcp://ADDRESS:PORT")
    if runtime.tcp and not runtime.curve:
        problems.append(f"runtime.tcp = {runtime.tcp!r}: needs runtime.curve, a directory with keys")
    if runtime.endpoint and not re.match(r"(ipc|tcp)://.", runtime.endpoint):
        problems.append(f"runtime.endpoint = {runtime.endpoint!r}: expected ipc://PATH or tcp://ADDRESS:PORT")
    return problems


def _check_metrics(settings: "Settings") -> list[str]:
    """Whoever reaches the page sees what runs here, so it is for this machine only."""
    listen = settings.metrics.listen
    is_port = re.fullmatch(r"(127(?:\.\d{1,3}){3}|localhost|\[::1\]):(\d{1,5})", listen)
    if not listen or re.fullmatch("unix:.+", listen) or (is_port and 0 < int(is_port[2]) < 65536):
        return []
    return [f'metrics.listen = {listen!r}: expected "unix:PATH", a loopback "127.0.0.1:PORT", or "" for none']
