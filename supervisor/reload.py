"""What a new configuration changes while everything runs, and what has to wait for a restart. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from barrel_inference import config
from barrel_inference.config import Settings

# Keys, or tables of them, that processes take up while they run; `*` is any name. The rest fixes what processes have agreed
# on (block size, salts, directories): two of them with different values would be worse than the old value everywhere.
LIVE = ("log.level", "pressure", "limits", "models", "tiers.*.quota_bytes")


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from a new configuration."""

    effective: Settings  # the old settings with the live keys of the new ones
    changed: tuple[str, ...]
    pending: tuple[str, ...]
    load: tuple[str, ...]  # models that are to be loaded at start from now on


def plan(old: Settings, new: Settings) -> Plan:
    """What to do about `new`; both are resolved."""
    different = tuple(_differences(config.dump(old), config.dump(new)))
    effective = msgspec.structs.replace(
        old,
        log=msgspec.structs.replace(old.log, level=new.log.level),
        pressure=new.pressure,
        limits=new.limits,
        models=new.models,
        tiers={
            name: msgspec.structs.replace(tier, quota_bytes=new.tiers.get(name, tier).quota_bytes)
            for name, tier in old.tiers.items()
        },
    )
    return Plan(
        effective=effective,
        changed=tuple(key for key in different if is_live(key)),
        pending=tuple(key for key in different if not is_live(key)),
        load=tuple(name for name in new.models if _is_loaded_at_start(new, name) > _is_loaded_at_start(old, name)),
    )


def is_live(key: str) -> bool:
    """Whether a dotted key is taken up without a restart."""
    return any(fnmatchcase(key, live) or fnmatchcase(key, f"{live}.*") for live in LIVE)


def _is_loaded_at_start(settings: Settings, name: str) -> bool:
    return bool(settings.models.get(name, {}).get("autoload", False))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys whose values differ, in the order of the files."""
    for key in (*old, *(key for key in new if key not in old)):
        before, after = old.get(key), new.get(key)
        # A model is one thing: which of its options differs matters to nobody.
        if prefix != "models." and isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, f"{prefix}{key}.")
        elif before != after or (key in old) != (key in new):
            yield f"{prefix}{key}"
