"""One caller's stream: events while there is credit and it is time for one, one growing event while not. Pure but for the send.

The caller grants credit in events. Without credit, text is appended to the event that waits, so a slow reader costs at most
one context's text, and loses nothing. The same holds back all but one event in each interval that the caller asked for: an
event costs four processes a wake-up, on cores that compute the next token. Intervals begin at the same instants for every
stream, so that those of many streams share a wake-up.
"""

from collections.abc import Callable, Sequence

from barrel_inference.protocol import Message, TokenEvent
from barrel_inference.workers.model.text import Piece


class Stream:
    """Feed it pieces, credit and the time; it calls `send(kind, body)` in order, and `finish` once everything before it is out.

    Args:
        interval_s: in each interval of that length comes one event, the last ones excepted; 0 = as many as there are.
    """

    def __init__(self, send: Callable[[str, Message], None], credit: int, seed: int, interval_s: float = 0.0) -> None:
        self.next_s = 0.0  # monotonic: no event before; 0 = the first one has not been sent
        self._send = send
        self._credit = credit
        self._interval_s = interval_s
        self._wants_events = credit > 0
        self._seed: int | None = seed
        self._waiting: list[Piece] = []
        self._finish: Callable[[], None] | None = None
        self._is_last_call = False

    @property
    def can_send(self) -> bool:
        """Would another piece be sent when its time comes?"""
        return self._credit > 0 and self._finish is None

    def grant(self, events: int, now_s: float) -> None:
        """The caller is ready for more events."""
        self._credit += events
        self.pump(now_s)

    def push(self, pieces: Sequence[Piece], now_s: float) -> None:
        """Queue pieces; neighbours of one kind become one event."""
        if not self._wants_events:
            return
        for piece in pieces:
            last = self._waiting[-1] if self._waiting else None
            if last is not None and last.kind == piece.kind and not piece.ends_span:
                self._waiting[-1] = Piece(piece.kind, last.data + piece.data, last.token_ids + piece.token_ids)
            else:
                self._waiting.append(piece)
        self.pump(now_s)

    def hurry(self) -> None:
        """What comes next is not worth waiting for more: it may be sent at once."""
        self.next_s = 0.0

    def end(self, finish: Callable[[], None], now_s: float) -> None:
        """Call `finish` when every piece has been sent."""
        self._finish = finish
        self.pump(now_s)

    def last_call(self, now_s: float) -> None:
        """The process ends: what waits is sent now, and the rest as it comes, credit or not; the reader keeps it."""
        self._is_last_call = True
        self.pump(now_s)

    def pump(self, now_s: float) -> None:
        """Send what may be sent by now."""
        is_due = self._is_last_call or self._finish is not None or now_s >= self.next_s
        while is_due and self._waiting and (self._credit > 0 or self._is_last_call):
            piece = self._waiting.pop(0)
            self._credit -= 1
            self.next_s = self._next(now_s)
            self._send(piece.kind, TokenEvent(data=piece.data, token_ids=list(piece.token_ids), seed=self._seed))
            self._seed = None
        if not self._waiting and self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def _next(self, now_s: float) -> float:
        """When the interval after this one begins."""
        return (now_s // self._interval_s + 1) * self._interval_s if self._interval_s else now_s
