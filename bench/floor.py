"""The floor: what llama.cpp itself needs, called by hand in a bare script, its threads set up and placed as ours are."""

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator

from barrel_inference.supervisor.spec import THREADS_ENVIRONMENT

os.environ |= THREADS_ENVIRONMENT  # as our model processes have it; memory as malloc gives it

import llama_cpp.llama_cpp as L
from workload import N_BATCH, N_CTX, THREADS

from barrel_inference.workers.model import cores

BLOCK = 256
STREAMS = 8
SPARE = STREAMS


@L.llama_log_callback
def _quiet(_level: int, _text: bytes, _data: object) -> None:
    pass


@contextlib.contextmanager
def spread() -> Iterator[None]:
    """llama.cpp's threads each on a core of its own, as ours; afterwards this thread serves the bench's clients anywhere."""
    cores.spread(team=THREADS, working=THREADS)
    try:
        yield
    finally:
        cores.spread(team=THREADS, working=0)


class Floor:
    """One context with the options of our own."""

    def __init__(self, model_path: str) -> None:
        L.llama_log_set(_quiet, ctypes.c_void_p(0))
        L.llama_backend_init()
        self.model = L.llama_model_load_from_file(model_path.encode(), L.llama_model_default_params())
        self.n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(self.model))
        params = L.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = N_CTX, N_BATCH, N_BATCH
        params.n_seq_max, params.kv_unified = STREAMS + 1, True
        params.n_threads = params.n_threads_batch = THREADS
        self.context = L.llama_init_from_model(self.model, params)
        self.memory = L.llama_get_memory(self.context)
        self.batch = L.llama_batch_init(N_BATCH, 0, 1)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """One call: (token, position, sequence, wants logits) per row."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, seq, logits) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, seq
            batch.logits[i] = logits
        assert L.llama_decode(self.context, batch) == 0

    def greedy(self, row: int) -> int:
        """The most likely token of a row, by llama.cpp's own sampler."""
        if not hasattr(self, "sampler"):
            self.sampler = L.llama_sampler_init_greedy()
        return int(L.llama_sampler_sample(self.sampler, self.context, row))

    def clear(self) -> None:
        """Empty every sequence."""
        for seq in range(STREAMS + 1):
            L.llama_memory_seq_rm(self.memory, seq, -1, -1)

    @spread()
    def prefill(self, tokens: list[int], seq: int = 0) -> float:
        """Seconds from an emptied context to the first token."""
        self.clear()
        began_s = time.perf_counter()
        last = len(tokens) - 1
        for start in range(0, last, N_BATCH):
            end = min(start + N_BATCH, last)
            self.decode([(tokens[i], i, seq, False) for i in range(start, end)])
        self.decode([(tokens[last], last, seq, True)])
        self.greedy(-1)
        return time.perf_counter() - began_s

    def export(self, length: int, seq: int = 0) -> list[ctypes.Array[ctypes.c_uint8]]:
        """The sequence's cells in blocks, in memory."""
        blocks = []
        for start in range(0, length, BLOCK):
            L.llama_memory_seq_cp(self.memory, seq, SPARE, start, min(start + BLOCK, length))
            size = L.llama_state_seq_get_size(self.context, SPARE)
            data = (ctypes.c_uint8 * size)()
            assert L.llama_state_seq_get_data(self.context, data, size, SPARE) == size
            L.llama_memory_seq_rm(self.memory, SPARE, -1, -1)
            blocks.append(data)
        return blocks

    @spread()
    def restore(self, tokens: list[int], blocks: list[ctypes.Array[ctypes.c_uint8]]) -> float:
        """Seconds to import the blocks into an emptied context and decode the last token."""
        self.clear()
        began_s = time.perf_counter()
        for data in blocks:
            assert L.llama_state_seq_set_data(self.context, data, len(data), SPARE) == len(data)
            L.llama_memory_seq_cp(self.memory, SPARE, 0, -1, -1)
            L.llama_memory_seq_rm(self.memory, SPARE, -1, -1)
        last = len(tokens) - 1
        L.llama_memory_seq_rm(self.memory, 0, last, -1)
        self.decode([(tokens[last], last, 0, True)])
        self.greedy(-1)
        return time.perf_counter() - began_s

    @spread()
    def decode_rate(self, streams: int, tokens: int) -> float:
        """Tokens per second of `streams` sequences that generate together, all of them counted."""
        self.clear()
        for seq in range(streams):
            self.decode([(1000 + seq * 100 + i, i, seq, i == 31) for i in range(32)])
        following = [5000 + seq for seq in range(streams)]
        began_s = time.perf_counter()
        for step in range(tokens):
            self.decode([(following[seq], 32 + step, seq, True) for seq in range(streams)])
            following = [self.greedy(row) for row in range(streams)]
        return streams * tokens / (time.perf_counter() - began_s)

    def close(self) -> None:
        """Free it."""
        L.llama_free(self.context)
        L.llama_model_free(self.model)
