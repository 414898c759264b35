"""What the tests of loading share: a configuration with models by name, and looks at a model's process from outside."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from barrel_inference import Client
from barrel_inference.results import Completion
from tests.process.caching import POLICY

NOT_THERE = "/nowhere/model.gguf"
PROMPT = "the rain in the stone house on the hill"


def config(folder: Path, dense: Path) -> dict[str, Any]:
    """Small tiers, one more disk tier, and three models by name; all log lines."""
    return {
        "tiers": {
            "ram": {"quota_bytes": "64MiB"}, "ram_file": {"enabled": False}, "disk": {"quota_bytes": "64MiB"},
            "archive": {"kind": "disk", "quota_bytes": "64MiB", "root": str(folder / "archive")},
        },
        "writer": {"processes": 1, "staging_bytes": "16MiB"},
        "log": {"level": "debug"},
        "limits": {"grammar_bytes": 2000},
        "models": {
            "named": {"model_path": str(dense), "policy": POLICY, "context_opts": {"n_ctx": 512, "n_threads": 1}},
            "auto": {"model_path": "any", "backend": "stub", "autoload": True},
            "broken": {"model_path": NOT_THERE, "autoload": True},
        },
    }  # fmt: skip


def tiny(client: Client, path: Path, model_id: str | None = None, **options: Any) -> str:
    """A real model with small contexts."""
    context = {"n_ctx": 512, "n_batch": 128, "n_threads": 1} | options.pop("context_opts", {})
    return client.load_model(path, model_id, policy=POLICY, context_opts=context, **options)


def ask(client: Client, model: str, prompt: str = PROMPT, tokens: int = 6) -> Completion:
    """A greedy answer whose save was accepted."""
    return client.complete(model, prompt, response_tokens=tokens)


def once(client: Client, path: Path, look: Callable[[str], Any], **options: Any) -> Any:
    """What `look` finds of a model that is loaded for it alone."""
    model = tiny(client, path, **options)
    try:
        return look(model)
    finally:
        client.unload(model)


def locked_bytes(pid: int) -> int:
    """What a process has locked in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmLck"))


def flags_of_mapping(pid: int, path: Path) -> list[str]:
    """The kernel's flags of the mappings of a file; empty when it is not mapped."""
    found, is_it = [], False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            is_it = line.endswith(str(path))
        elif is_it and line.startswith("VmFlags"):
            found.append(line)
    return found
