"""One caller's stream: events while there is credit, one growing event while there is none. Pure but for the send.

The caller grants credit in events. Without credit, text is appended to the event that waits, so a slow reader costs at most
one context's text, and loses nothing.
"""

from collections.abc import Callable, Sequence

from barrel_inference.protocol import Message, TokenEvent
from barrel_inference.workers.model.text import Piece


class Stream:
    """Feed it pieces and credit; it calls `send(kind, body)` in order, and `finish` once everything before it is out."""

    def __init__(self, send: Callable[[str, Message], None], credit: int, seed: int) -> None:
        self._send = send
        self._credit = credit
        self._wants_events = credit > 0
        self._seed: int | None = seed
        self._waiting: list[Piece] = []
        self._finish: Callable[[], None] | None = None
        self._is_last_call = False

    def grant(self, events: int) -> None:
        """The caller is ready for more events."""
        self._credit += events
        self._pump()

    def push(self, pieces: Sequence[Piece]) -> None:
        """Queue pieces; neighbours of one kind become one event."""
        if not self._wants_events:
            return
        for piece in pieces:
            last = self._waiting[-1] if self._waiting else None
            if last is not None and last.kind == piece.kind and self._credit <= 0:
                self._waiting[-1] = Piece(piece.kind, last.data + piece.data, last.token_ids + piece.token_ids)
            else:
                self._waiting.append(piece)
        self._pump()

    def end(self, finish: Callable[[], None]) -> None:
        """Call `finish` when every piece has been sent."""
        self._finish = finish
        self._pump()

    def last_call(self) -> None:
        """The process ends: what waits is sent now, and the rest as it comes, credit or not; the reader keeps it."""
        self._is_last_call = True
        self._pump()

    def _pump(self) -> None:
        while self._waiting and (self._credit > 0 or self._is_last_call):
            piece = self._waiting.pop(0)
            self._credit -= 1
            self._send(piece.kind, TokenEvent(data=piece.data, token_ids=list(piece.token_ids), seed=self._seed))
            self._seed = None
        if not self._waiting and self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
