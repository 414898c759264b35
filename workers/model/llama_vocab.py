"""A model's vocabulary: text to tokens and back. Any thread may call it: llama.cpp only reads here."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import llama_cpp.llama_cpp as L

from barrel_inference.errors import InvalidArgument
from barrel_inference.tiers import key as keys

# A token that text cannot spell under any split: its bytes are escaped in keys.
_NOT_TEXT = L.LLAMA_TOKEN_ATTR_CONTROL | L.LLAMA_TOKEN_ATTR_UNKNOWN
_FirstGuess = ctypes.c_char * 64


def _quick(function: Any, result: type, *arguments: type) -> Callable[..., Any]:
    """A function of llama.cpp that takes less time than giving up the interpreter's lock and getting it back."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address
    return ctypes.PYFUNCTYPE(result, *arguments)(address)


_token_to_piece = _quick(
    L.llama_token_to_piece,
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_bool,
)  # fmt: skip
_get_attr = _quick(L.llama_vocab_get_attr, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)


class LlamaVocab:
    """Tokens and pieces of one model; pieces are looked up once."""

    def __init__(self, model: object) -> None:
        self._vocab = L.llama_model_get_vocab(model)
        self.n_vocab = int(L.llama_vocab_n_tokens(self._vocab))
        self.handle = self._vocab
        self._takes_any_bytes = L.llama_vocab_type(self._vocab) == L.LLAMA_VOCAB_TYPE_SPM
        # A prompt has thousands of tokens: found in C, once they were looked up.
        self.piece: Callable[[int], bytes] = functools.cache(self._piece)
        self.special_piece: Callable[[int], bytes] = functools.cache(self._special_piece)
        self.rendered: Callable[[int], bytes] = functools.cache(self._render)

    def tokenize(self, text: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text.

        Bytes that are no UTF-8 become byte tokens where the vocabulary has them for all bytes (SentencePiece), else U+FFFD, as
        llama.cpp does with most of them; with the others its splitter throws, which ends the process.
        """
        if not self._takes_any_bytes:
            text = text.decode("utf-8", "replace").encode()
        room = len(text) // 2 + 16
        for _ in range(2):
            tokens = (L.llama_token * room)()
            count = L.llama_tokenize(self._vocab, text, len(text), tokens, room, add_special, parse_special)
            if count >= 0:
                return list(tokens[:count])
            room = -count
        raise InvalidArgument(f"{len(text)} bytes of text cannot be tokenized")

    def _piece(self, token: int) -> bytes:
        """A token's text as it is shown; empty for control tokens."""
        self.check(token)
        return self._to_piece(token, special=False)

    def _special_piece(self, token: int) -> bytes:
        """A token's text with control tokens spelt out."""
        self.check(token)
        return self._to_piece(token, special=True)

    def _render(self, token: int) -> bytes:
        """A token's bytes as they are hashed.

        Escaped by id: control and unknown tokens, and every token without text, which would otherwise vanish from the key.
        User-defined tokens are plain: llama.cpp's tokenizer finds them in any text, so the same bytes are the same prompt.
        """
        text = self.special_piece(token)
        is_text = text and not _get_attr(self._vocab, token) & _NOT_TEXT
        return keys.escape_plain(text) if is_text else keys.escape_control(token)

    def is_end(self, token: int) -> bool:
        """Is this an end-of-generation token?"""
        return 0 <= token < self.n_vocab and bool(L.llama_vocab_is_eog(self._vocab, token))

    def check(self, token: int) -> None:
        """Refuse an id that the vocabulary does not have: llama.cpp would read beyond its tables.

        Raises:
            InvalidArgument
        """
        if not 0 <= token < self.n_vocab:
            raise InvalidArgument(f"token id {token} is outside the vocabulary of {self.n_vocab} tokens")

    def bos_text(self) -> str:
        """The text of the token that begins a sequence, for chat templates."""
        return self._text(L.llama_vocab_bos(self._vocab))

    def eos_text(self) -> str:
        """The text of the token that ends a sequence, for chat templates."""
        return self._text(L.llama_vocab_eos(self._vocab))

    def longest_piece_bytes(self) -> int:
        """No token stands for more bytes of text; 0 for vocabularies that merge unknown text into one token."""
        return self._longest_piece_bytes

    @functools.cached_property
    def _longest_piece_bytes(self) -> int:
        if L.llama_vocab_type(self._vocab) not in (L.LLAMA_VOCAB_TYPE_SPM, L.LLAMA_VOCAB_TYPE_BPE):
            return 0
        text_of = L.llama_vocab_get_text
        return max(len(text_of(self._vocab, token) or b"") for token in range(self.n_vocab))

    def _text(self, token: int) -> str:
        return "" if token < 0 else (L.llama_vocab_get_text(self._vocab, token) or b"").decode("utf-8", "replace")

    def _to_piece(self, token: int, *, special: bool) -> bytes:
        buffer = _FirstGuess()
        count = int(_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special))
        if count < 0:
            buffer = (ctypes.c_char * -count)()
            count = _token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
            assert count >= 0, token
        return buffer.raw[:count]
