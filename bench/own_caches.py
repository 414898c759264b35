"""The caches that llama-cpp-python itself ships: the whole context's state, in memory or pickled on disk."""

import shutil
import tempfile
import time
from collections.abc import Iterator

import llama_cpp
from floor import spread
from workload import N_BATCH, N_CTX, THREADS

CAPACITY_BYTES = 4 * 2**30


def both() -> Iterator[tuple[str, llama_cpp.llama_cache.BaseLlamaCache]]:
    """Each with its name."""
    yield "llama-cpp-python RAM", llama_cpp.LlamaRAMCache(CAPACITY_BYTES)
    folder = tempfile.mkdtemp(prefix="bench-")
    try:
        yield "llama-cpp-python disk", llama_cpp.LlamaDiskCache(folder, CAPACITY_BYTES)
    finally:
        shutil.rmtree(folder)


def warm(
    model_path: str, tokens: list[int], visitor: list[int], cache: llama_cpp.llama_cache.BaseLlamaCache, repeats: int
) -> Iterator[float]:
    """Seconds to the first token of a prompt that was computed before, each time after another prompt."""
    llama = llama_cpp.Llama(
        model_path, n_ctx=N_CTX, n_batch=N_BATCH, n_ubatch=N_BATCH, n_threads=THREADS, n_threads_batch=THREADS,
        flash_attn=True, verbose=False,
    )  # fmt: skip
    llama.set_cache(cache)

    def first(prompt: list[int]) -> float:
        began_s = time.perf_counter()
        arrived_s = 0.0
        with spread():
            for _ in llama.create_completion(prompt, max_tokens=1, temperature=0.0, stream=True):
                arrived_s = arrived_s or time.perf_counter() - began_s
        return arrived_s

    first(tokens)
    for _ in range(repeats):
        first(visitor)
        yield first(tokens)
    llama.close()
