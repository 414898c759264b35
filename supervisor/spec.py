"""The child specifications of a configuration, in start order. Pure.

Stop order is the reverse: models first, while the tiers still take their last saves; the router last, because it carries
their last words to clients.
"""

import re
from collections.abc import Iterable
from typing import Any

from barrel_inference.config import Settings, TierSettings
from barrel_inference.protocol import ChildSpec

# Above what draining costs beyond the saves themselves: sockets, sampling threads, freeing a context.
_MODEL_STOP_MARGIN_MS = 5000

# A start-up scan reads the header of every file; on a slow disk with 100,000 of them that takes minutes.
_FILE_TIER_READY_MS = 300_000

# llama.cpp's threads spin at a barrier after each graph node. Without a bound, one busy neighbour makes a token take seconds;
# with less than some 5,000 turns they fall asleep at every barrier where memory is slow, and a token takes three times as long.
# And active: libgomp cuts the bound once a process has more OpenMP threads than cores, to 1,000 then, and to 100 without it;
# on two cores that cost 40 % of the decode rate.
THREADS_ENVIRONMENT = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "10000"}

# And huge pages for what malloc gets from the system: on small ones a token takes 7 % longer, an import 13 %.
MODEL_ENVIRONMENT = THREADS_ENVIRONMENT | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "GGML_NO_BACKTRACE": "1"}

# The id is a socket's name in the runtime directory; `supervisor` is the supervisor's own.
_ID = re.compile(r"[A-Za-z0-9_][\w.:+-]{0,199}")
_RESTARTS = ("permanent", "transient", "temporary")
_GROUPS = ("helper", "model")


def tree_of(settings: Settings) -> list[ChildSpec]:
    """Every child that a runtime with these (resolved) settings starts by itself, in start order."""
    return [
        ChildSpec(id="router", module="barrel_inference.workers.router", essential=True),
        *(tier_child(name, tier) for name, tier in settings.tiers.items() if tier.enabled),
        # After the tiers, so that it stops before them: at the end it tells them the recency, hits and pins to keep.
        ChildSpec(id="index", module="barrel_inference.workers.index", essential=True),
        *(writer_child(number) for number in range(settings.writer.processes)),
        # Off by default, but there: it can be switched on while everything runs.
        ChildSpec(id="pressure", module="barrel_inference.workers.pressure", niceness=19),
        *(
            model_child(name, options, settings)
            for name, options in settings.models.items()
            if options.get("autoload", False)
        ),
    ]


def tier_child(name: str, tier: TierSettings) -> ChildSpec:
    """One tier server; the same module serves all kinds."""
    return ChildSpec(
        id=f"tier:{name}",
        module="barrel_inference.tiers.tier",
        boot={"kind": tier.kind, "name": name, "root": tier.root},
        ready_ms=30_000 if tier.kind == "ram" else _FILE_TIER_READY_MS,
    )


def writer_child(number: int) -> ChildSpec:
    """One member of the save pool. Nice, so that saving never takes a core from decoding."""
    return ChildSpec(id=f"writer:{number}", module="barrel_inference.workers.writer", niceness=19)


def model_child(model_id: str, options: dict[str, Any], settings: Settings) -> ChildSpec:
    """The process of one model. `options` are those of load_model, by name."""
    return ChildSpec(
        id=f"model:{model_id}",
        module="barrel_inference.workers.model.process",
        boot={"model_id": model_id, "options": {key: value for key, value in options.items() if key != "autoload"}},
        restart="transient",
        shutdown_ms=settings.cache.evict_save_timeout_ms + _MODEL_STOP_MARGIN_MS,
        ready_ms=0,  # a large file on a slow disk may take any time; a load is ended by unloading
        group="model",
        environment=MODEL_ENVIRONMENT,
    )


def problems(spec: ChildSpec) -> list[str]:
    """What is wrong with a specification that came from outside; empty when it can be started."""
    found = []
    if not _ID.fullmatch(spec.id) or spec.id == "supervisor":
        found.append(f"id {spec.id!r} cannot be the name of a process")
    if spec.restart not in _RESTARTS:
        found.append(f"restart {spec.restart!r} is none of {', '.join(_RESTARTS)}")
    if spec.group not in _GROUPS:
        found.append(f"group {spec.group!r} is none of {', '.join(_GROUPS)}")
    if not -20 <= spec.niceness <= 19:
        found.append(f"niceness {spec.niceness} is outside -20..19")
    return found


def duplicate_ids(specs: Iterable[ChildSpec]) -> list[str]:
    """Ids that are given more than once."""
    seen: set[str] = set()
    return [spec.id for spec in specs if spec.id in seen or seen.add(spec.id)]  # type: ignore[func-returns-value]
