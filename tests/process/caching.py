"""Small models and moves for tests of the whole cache: what is saved, from where it comes back, what lies in the tiers."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from barrel_inference import Client, Runtime
from barrel_inference.results import CacheRow, Completion
from tests.process.killing import wait_for

# Saves from the fourth token on, at every length.
POLICY = {
    "min_tokens": 4, "cold_min_tokens": 4, "cold_max_tokens": 100_000, "continued_interval": 2048,
    "boundary_trim_tokens": 0, "boundary_align_tokens": 1, "session_resume_wait_ms": 50,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "tiers": {"ram": {"quota_bytes": "64MiB"}, "ram_file": {"quota_bytes": "64MiB"}, "disk": {"quota_bytes": "256MiB"}},
    "writer": {"processes": 2, "staging_bytes": "16MiB"},
    # These tests kill more in a minute than a runtime that is to be trusted would survive.
    "supervisor": {"intensity": 1000, "model_intensity": 1000, "backoff_max_s": 0.2},
}  # fmt: skip
FILE_TIERS = ("ram_file", "disk")
TIERS = ("ram", *FILE_TIERS)
L12 = " ".join(str(number) for number in range(1, 13))
T12 = list(range(1, 13))
TOO_SHORT = [900, 901, 902]  # below every gate: takes the sequence and saves nothing

_names = itertools.count(1)


def load(
    client: Client, *, tier: str = "ram", name: str | None = None, policy: dict[str, Any] | None = None,
    context: dict[str, Any] | None = None, **model_opts: Any,
) -> str:  # fmt: skip
    """A stub model with one sequence; a namespace of its own unless it is given a name."""
    return client.load_model(
        name or f"stub-{next(_names)}", backend="stub", tier=tier, policy=POLICY | (policy or {}), model_opts=model_opts,
        context_opts={"n_ctx": 8192, "n_batch": 512, "n_seq_max": 1, **(context or {})},
    )  # fmt: skip


def load_tiny(client: Client, path: Path, *, tier: str = "ram", **policy: Any) -> str:
    """A tiny real model in a namespace of its own."""
    return client.load_model(
        path, tier=tier, policy=POLICY | policy, fingerprint=next(_names).to_bytes(32, "big"), fingerprint_mode="fast_unsafe",
        context_opts={"n_ctx": 1024, "n_batch": 128, "n_seq_max": 1, "n_threads": 1},
    )  # fmt: skip


def forget(client: Client, model: str) -> None:
    """Take the live cells away: what comes next can only come from a tier."""
    assert client.complete(model, TOO_SHORT, response_tokens=0).finish_key is None


def rows(client: Client, model: str) -> list[CacheRow]:
    """The rows of one model."""
    return [row for row in client.cache.dump() if row.model_id == model]


def saved(client: Client, result: Completion) -> Completion:
    """Wait until a result's save is published, and nothing else is on its way."""
    assert result.finish_key is not None
    wait_for(
        lambda: (
            all(row.status == "available" for row in client.cache.dump())
            and any(row.key == result.finish_key for row in client.cache.dump())
        ),
        "the save is published",
    )
    return result


def nothing_is_on_its_way(client: Client) -> None:
    """Wait until nothing is being written."""
    wait_for(lambda: all(row.status == "available" for row in client.cache.dump()), "saves are over")


def ask(client: Client, model: str, prompt: str | Sequence[int], tokens: int = 4, **options: Any) -> Completion:
    """A completion whose saves are published, after the live cells were forgotten."""
    forget(client, model)
    return saved(client, client.complete(model, prompt, response_tokens=tokens, **options))


def moved(client: Client, before: dict[str, int]) -> dict[str, int]:
    """The counters that have moved, and by how much; timings and probes are left out."""
    after = client.counters()
    return {
        name: after[name] - before[name] for name in before
        if after[name] != before[name] and not name.endswith("_ns") and name != "longest_prefix_probes"
    }  # fmt: skip


def root_of(runtime: Runtime, tier: str) -> Path:
    """The directory of a file tier."""
    return Path(runtime.settings.tiers[tier].root)


def files_of(runtime: Runtime, tier: str) -> list[Path]:
    """Every file of a tier, leftovers included; not the one that says who has it."""
    return [path for path in root_of(runtime, tier).rglob("*") if path.is_file() and path.name != ".lock"]


def check_books(client: Client, runtime: Runtime) -> None:
    """Wait until the index says of every file tier what lies there: the same files, the same bytes, within the quota."""

    def agree() -> bool:
        stats = {one.server: one for one in client.cache.stats().tiers}
        for tier in FILE_TIERS:
            one, dump = stats[f"tier:{tier}"], client.cache.dump(tier=tier)
            nodes = {row.location: row.size_bytes for row in dump if row.size_bytes}
            root = root_of(runtime, tier)
            try:
                there = {str(path.relative_to(root)): path.stat().st_size for path in files_of(runtime, tier)}
            except FileNotFoundError:
                return False  # one has just gone
            in_order = one.up and one.reserved_bytes == 0 and one.stored_bytes == sum(nodes.values()) <= one.quota_bytes
            if nodes != there or not in_order or client.counters()[f"bytes_{tier}"] != one.stored_bytes:
                return False
        return True

    wait_for(agree, "the index and the tiers agree", 30)
