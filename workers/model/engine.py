"""What the model process needs of an engine, in words. Pure.

An engine owns one context with `n_seq_max` sequences (ids from 0) that share `n_cells` KV cells; helper sequence ids are its
own business. Methods under "vocabulary" may be called from any thread; everything else from the engine thread only, except
`interrupt`. Positions count tokens from 0; a range is [start, end).

Two engines exist: `engine_llama` (llama.cpp) and `engine_stub` (deterministic, no model file). The same contract tests run
on both (tests/contracts/test_engine.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from barrel_inference.protocol import Sampling

# One row of logits, as it can be stored: only the engine that made it knows what the bytes mean.
Logits = bytes | memoryview


class Row(NamedTuple):
    """One token of one sequence in a decode call."""

    token: int
    position: int
    seq: int
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the context really got, read back after it was made."""

    n_ctx: int  # tokens one request may have, prompt and reply
    n_cells: int  # KV cells shared by all sequences
    n_batch: int  # rows of one decode call at most
    n_seq_max: int
    n_vocab: int
    logits_bytes: int  # of one row of logits
    n_threads: int
    window_tokens: int  # sliding window of some layers; 0 = none
    has_cells: bool  # False: purely recurrent, nothing is stored per position
    needs_snapshot: (
        bool  # True: a prefix resumes only where a snapshot was taken (recurrent, hybrid, small-window cache)
    )
    cacheable: bool  # False: the check at load failed; nothing is exported (`miss_reason` memory_kind)
    fingerprint: bytes  # 32 bytes, adapters not included
    quant_type: str
    quant_bits: int
    ctx_params_hash: bytes  # 32 bytes
    memory_bytes: dict[str, int] = field(default_factory=dict)  # weights, kv, compute
    chat_template: str | None = None
    bos_text: str = ""
    eos_text: str = ""
    vocab_only: bool = False
    embeddings_only: bool = False
    warnings: tuple[str, ...] = ()  # what was asked for and is not so, or not wise


class StepFailed(Exception):
    """llama.cpp refused a decode call (its return code); nothing of the batch was stored."""

    def __init__(self, code: int) -> None:
        super().__init__(f"decode returned {code}")
        self.code = code


class NoCells(Exception):
    """The cells do not suffice for this batch; nothing changed."""


class StepInterrupted(Exception):
    """`interrupt` stopped the call; `lengths` says how many tokens each sequence of the batch holds now (None: unknown,
    the sequence has to be rebuilt)."""

    def __init__(self, lengths: dict[int, int | None]) -> None:
        super().__init__("decode was interrupted")
        self.lengths = lengths


class Sampler(Protocol):
    """One request's chain: penalties, grammar, filters, draw."""

    def sample(self, logits: Logits, number: int) -> int:
        """The token drawn from a row of logits as generated token `number` of the request, and accept it.

        The draw depends on the logits, the options, what was accepted before, and (seed, number) only.

        Raises:
            GrammarFailed: nothing that the grammar allows can be chosen.
        """

    def accept(self, token: int, number: int) -> None:
        """Take a token as if it had been drawn (resubmission: it was, by a process that died)."""

    def top_logprobs(self, logits: Logits, count: int) -> list[tuple[int, float]]:
        """The most likely tokens of a row with their log-probabilities, before any filter."""

    def close(self) -> None:
        """Free it."""


class Engine(Protocol):
    """One loaded model with its context."""

    info: EngineInfo

    # --- vocabulary (any thread)

    def longest_piece_bytes(self) -> int:
        """No token stands for more bytes of text; 0 = unknown. The first time it takes a moment."""

    def tokenize(self, text: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text."""

    def piece(self, token: int) -> bytes:
        """A token's text as it is shown; empty for control tokens."""

    def special_piece(self, token: int) -> bytes:
        """A token's text with control tokens spelt out, for markers and `detokenize`."""

    def rendered(self, token: int) -> bytes:
        """A token's bytes as they are hashed: control tokens escaped, so that no text can spell them."""

    def is_end(self, token: int) -> bool:
        """Is this an end-of-generation token?"""

    # --- computing

    def decode(self, rows: Sequence[Row]) -> None:
        """Compute the rows and store their KV. Logits of the rows that want them stay readable until the next call.

        Raises:
            NoCells, StepFailed, StepInterrupted
        """

    def logits(self, row: int) -> Logits:
        """A row of the last decode call, valid until the next one; the row has to have asked for its logits."""

    def interrupt(self) -> None:
        """From any thread: stop the decode call under way soon, if the backend can."""

    def new_sampler(self, sampling: Sampling, *, seed: int, prompt: Sequence[int]) -> Sampler:
        """A request's sampler, fed with the prompt for its penalties.

        Raises:
            GrammarFailed: the grammar or the JSON schema does not compile.
        """

    def set_threads(self, count: int) -> None:
        """Threads from the next call on, but no more than the options say; they are placed on the cores."""

    def embed(self, tokens: Sequence[int]) -> list[float]:
        """The embedding of a text, computed apart from all sequences."""

    def set_adapters(self, adapters: Sequence[tuple[str, float]]) -> bytes:
        """Replace the adapters; returns the effective fingerprint (content and scales)."""

    def pin_resident(self) -> int:
        """Lock those pages of the weights that are in memory now; returns their bytes (`pin_resident_after_first_request`)."""

    # --- sequences

    def clear(self, seq: int) -> None:
        """Drop everything the sequence holds."""

    def can_cut(self, seq: int, length: int) -> bool:
        """May the sequence be continued at `length` after a `cut`? Windows and recurrent state may forbid it."""

    def cut(self, seq: int, length: int) -> bool:
        """Keep the first `length` tokens; False = refused and nothing may be assumed about the sequence any more."""

    def share(self, source: int, target: int, length: int) -> bool:
        """Let an empty `target` hold the first `length` tokens of `source` too; no bytes move. Not for models that need snapshots."""

    # --- state, out and in

    def cells_bytes(self, seq: int, start: int, end: int) -> int:
        """Bytes that `export_cells` will write; 0 when the model has no cells. -1 = these cells are not whole any more."""

    def export_cells(self, seq: int, start: int, end: int, target: memoryview) -> bool:
        """Write the KV of a range into `target`, exactly as long as `cells_bytes` said."""

    def import_cells(self, seq: int, start: int, end: int, source: memoryview) -> bool:
        """Append the KV of a range to a sequence that holds `start` tokens. False: refused, the sequence is as before.

        Raises:
            NoCells
        """

    def snapshot_bytes(self, seq: int) -> int:
        """Bytes of the state that belongs to the sequence's present end; 0 if this model needs none."""

    def export_snapshot(self, seq: int, target: memoryview) -> bool:
        """Write that state."""

    def import_snapshot(self, seq: int, length: int, source: memoryview) -> bool:
        """Set that state on a sequence that holds (at least) `length` tokens, and cut it there."""

    def close(self) -> None:
        """Free the context and the model."""
