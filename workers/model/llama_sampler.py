"""How the next token is chosen from a row of logits.

Nothing here reads logits out of the context by itself: after a restore llama.cpp still hands out the row of the request
before. The row comes in, from a decode call or a stored prefix, goes through the filters, and the chosen token's logit is looked
at *before* it is accepted: llama.cpp ends the process when a grammar is made to accept what it forbids, which
`llama_sampler_sample` does at a dead end.

The draw is ours, with a generator made of (seed, number of the token): no random state has to survive a resubmission.
"""

import ctypes
import time
from collections import OrderedDict
from collections.abc import Sequence

import llama_cpp.llama_cpp as L
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_grammar import json_schema_to_gbnf

from barrel_inference.errors import GrammarFailed
from barrel_inference.protocol import Sampling
from barrel_inference.workers.model.engine import Logits
from barrel_inference.workers.model.grammar_limits import MAX_GRAMMAR_BYTES, check_grammar, check_schema
from barrel_inference.workers.model.llama_log import LogLines

Row = npt.NDArray[np.float32]
LOGIT_BYTES = 4

# As llama.cpp's own programs: penalties look back that far, into the prompt too.
PENALTY_TOKENS = 64
# Below, a division by the temperature may leave the range of a float, and the draw is greedy anyway.
LOWEST_TEMPERATURE = 1e-6
_CACHED_GRAMMARS = 16
# A grammar that needs longer for one token holds up every other request; it only gets worse with the next.
GRAMMAR_STEP_S = 2.0
_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])  # struct llama_token_data


class Candidates:
    """An array of llama.cpp's own shape, filled anew for each choice; one per engine, as the engine has one thread."""

    def __init__(self, n_vocab: int) -> None:
        self._data = (L.llama_token_data * n_vocab)()
        self._address = ctypes.addressof(self._data)
        self._view = np.frombuffer(memoryview(self._data).cast("B"), _CANDIDATE)
        self._all_ids = np.arange(n_vocab, dtype=np.int32)
        self._array = L.llama_token_data_array(self._data, 0, -1, False)

    def fill(self, logits: Row) -> None:
        """Every token with its logit."""
        self._view["id"], self._view["logit"] = self._all_ids, logits
        self._array = L.llama_token_data_array(self._data, len(logits), -1, False)

    def fill_one(self, token: int, logit: float) -> None:
        """A single token: to ask whether a filter lets it pass."""
        self._view["id"][0], self._view["logit"][0] = token, logit
        self._array = L.llama_token_data_array(self._data, 1, -1, False)

    def apply(self, sampler: object) -> None:
        """Let a filter change logits, drop tokens, or sort."""
        L.llama_sampler_apply(sampler, ctypes.byref(self._array))

    def left(self) -> tuple[npt.NDArray[np.int32], Row]:
        """The tokens that are left and their logits, in the filters' order; valid until the array is filled again."""
        size = int(self._array.size)
        address = ctypes.cast(self._array.data, ctypes.c_void_p).value
        if address == self._address:
            view = self._view[:size]
        else:  # a filter may put a buffer of its own in the array's place
            assert address, "a filter left no array"
            foreign = (ctypes.c_uint8 * (size * _CANDIDATE.itemsize)).from_address(address)
            view = np.frombuffer(memoryview(foreign).cast("B"), _CANDIDATE)
        return view["id"], view["logit"]


class Grammars:
    """Compiled grammars, the last few kept: a compiled one is cloned in microseconds."""

    def __init__(self, vocab: object, log: LogLines, max_bytes: int = MAX_GRAMMAR_BYTES) -> None:
        self._vocab = vocab
        self._log = log
        self._max_bytes = max_bytes
        self._compiled: OrderedDict[str, object] = OrderedDict()

    def sampler_for(self, sampling: Sampling) -> object | None:
        """A fresh grammar sampler, or None when the request has no grammar.

        Raises:
            GrammarFailed: it does not compile, or is beyond the limits.
        """
        if sampling.grammar is not None:
            text = sampling.grammar
        elif sampling.json_schema is not None:
            text = self._from_schema(sampling.json_schema)
        else:
            return None
        compiled = self._compiled.pop(text, None) or self._compile(text)
        self._compiled[text] = compiled
        if len(self._compiled) > _CACHED_GRAMMARS:
            L.llama_sampler_free(self._compiled.popitem(last=False)[1])
        clone: object = L.llama_sampler_clone(compiled)
        return clone

    def _from_schema(self, schema: str) -> str:
        check_schema(schema, max_bytes=self._max_bytes)
        try:
            return str(json_schema_to_gbnf(schema))
        except Exception as bad:  # foreign code: it raises whatever its recursion stumbles over
            raise GrammarFailed(f"the JSON schema cannot be made a grammar: {type(bad).__name__}: {bad}") from bad

    def _compile(self, text: str) -> object:
        check_grammar(text, max_bytes=self._max_bytes)
        self._log.clear()
        compiled: object = L.llama_sampler_init_grammar(self._vocab, text.encode(), b"root")
        if not compiled:
            raise GrammarFailed(f"the grammar does not compile: {self._log.reason()}")
        return compiled

    def close(self) -> None:
        """Free what was kept."""
        for compiled in self._compiled.values():
            L.llama_sampler_free(compiled)
        self._compiled.clear()


def drawn(logits: Row, seed: int, number: int) -> int | None:
    """The index of a draw from the softmax of `logits`; None when nothing can be drawn.

    Depends on the logits, the seed and the number only.
    """
    if not len(logits) or not np.isfinite(highest := logits.max()):
        return None
    sums = np.exp(logits.astype(np.float64) - highest).cumsum()
    if not np.isfinite(sums[-1]):  # a NaN below the highest
        return None
    generator = np.random.Generator(np.random.Philox(key=seed, counter=number))
    index = int(np.searchsorted(sums, generator.random() * sums[-1], side="right"))
    return min(index, len(logits) - 1)


class LlamaSampler:
    """One request's sampler; see `Sampler`."""

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        prompt: Sequence[int],
        *,
        n_vocab: int,
        candidates: Candidates,
        grammars: Grammars,
    ) -> None:
        self._sampling = sampling
        self._seed = seed
        self._candidates = candidates
        bias = {token: value for token, value in sampling.logit_bias.items() if 0 <= token < n_vocab}
        self._bias_ids = np.fromiter(bias, np.int64, len(bias))
        self._bias = np.fromiter(bias.values(), np.float32, len(bias))
        self._grammar = grammars.sampler_for(sampling)
        self._penalties = _penalties(sampling, n_vocab)
        self._filters = _filters(sampling) if sampling.temperature >= LOWEST_TEMPERATURE else []
        if self._penalties:
            for token in prompt[-PENALTY_TOKENS:]:
                L.llama_sampler_accept(self._penalties, token)

    def sample(self, logits: Logits, number: int) -> int:
        """See `Sampler.sample`."""
        row = np.frombuffer(logits, np.float32)
        token = self._draw(row, number) if self._filters else self._greedy(row)
        self._accept(token)
        return token

    def _greedy(self, logits: Row) -> int:
        """The likeliest token; the grammar is asked about that one alone first, as it usually agrees."""
        adjusted = self._adjusted(logits)
        token = int(adjusted.argmax())
        if not np.isfinite(adjusted[token]):
            raise _dead_end()
        if self._grammar is None or self._grammar_allows(token):
            return token
        self._candidates.fill(adjusted)
        self._apply_grammar()
        ids, allowed = self._candidates.left()
        best = int(allowed.argmax())
        if not np.isfinite(allowed[best]):
            raise _dead_end()
        return int(ids[best])

    def _draw(self, logits: Row, number: int) -> int:
        self._candidates.fill(self._adjusted(logits))
        if self._grammar is not None:
            self._apply_grammar()
        for part in self._filters:
            self._candidates.apply(part)
        ids, left = self._candidates.left()
        index = drawn(left, self._seed, number)
        if index is None or not np.isfinite(left[index]):
            raise _dead_end()
        return int(ids[index])

    def _adjusted(self, logits: Row) -> Row:
        """The row with biases and penalties; the row itself when there are none."""
        if len(self._bias):
            logits = logits.copy()
            logits[self._bias_ids] += self._bias
        if self._penalties:
            self._candidates.fill(logits)
            self._candidates.apply(self._penalties)
            logits = self._candidates.left()[1].copy()  # penalties keep the tokens and their order
        return logits

    def _apply_grammar(self) -> None:
        began_s = time.monotonic()
        self._candidates.apply(self._grammar)
        if (took_s := time.monotonic() - began_s) > GRAMMAR_STEP_S:
            raise GrammarFailed(
                f"the grammar took {took_s:.1f} s for one token, limit {GRAMMAR_STEP_S:g} s",
                hint="it is too ambiguous: write it so that a text can be read in few ways",
            )

    def _grammar_allows(self, token: int) -> bool:
        self._candidates.fill_one(token, 1.0)
        self._apply_grammar()
        allowed = self._candidates.left()[1]
        return bool(len(allowed)) and bool(np.isfinite(allowed[0]))

    def accept(self, token: int, number: int) -> None:
        """See `Sampler.accept`."""
        if self._grammar is not None and not self._grammar_allows(token):
            raise _dead_end()
        self._accept(token)

    def _accept(self, token: int) -> None:
        if self._grammar is not None:
            L.llama_sampler_accept(self._grammar, token)
        if self._penalties:
            L.llama_sampler_accept(self._penalties, token)

    def top_logprobs(self, logits: Logits, count: int) -> list[tuple[int, float]]:
        """See `Sampler.top_logprobs`."""
        row = np.frombuffer(logits, np.float32).astype(np.float64)
        count = min(count, len(row))
        top = np.argpartition(row, -count)[-count:] if count < len(row) else np.arange(len(row))
        top = top[np.lexsort((top, -row[top]))]
        highest = row.max()
        total = highest + np.log(np.exp(row - highest).sum())
        return [(int(token), float(row[token] - total)) for token in top]

    def close(self) -> None:
        """See `Sampler.close`."""
        for part in (self._grammar, self._penalties, *self._filters):
            if part is not None:
                L.llama_sampler_free(part)
        self._grammar = self._penalties = None
        self._filters = []


def _penalties(sampling: Sampling, n_vocab: int) -> object | None:
    if sampling.repetition_penalty == 1.0 and not sampling.frequency_penalty and not sampling.presence_penalty:
        return None
    made: object = L.llama_sampler_init_penalties(
        n_vocab,  # comes first in this version of llama.cpp
        PENALTY_TOKENS,
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
    )
    return made


def _filters(sampling: Sampling) -> list[object]:
    parts: list[object] = []
    if sampling.top_k:
        parts.append(L.llama_sampler_init_top_k(sampling.top_k))
    if sampling.top_p < 1:
        parts.append(L.llama_sampler_init_top_p(sampling.top_p, 1))
    if sampling.min_p:
        parts.append(L.llama_sampler_init_min_p(sampling.min_p, 1))
    parts.append(L.llama_sampler_init_temp(sampling.temperature))
    return parts


def _dead_end() -> GrammarFailed:
    return GrammarFailed(
        "no token can be chosen: the grammar allows none of this model's, or the logits are no numbers",
        hint="check that the grammar can be continued with the model's tokens at every point",
    )
