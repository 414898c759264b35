"""How many events a client may still be sent. Pure.

It grants `CREDIT_EVENTS` with the request and renews when half is used, so that a reader that pauses holds up its own
stream and nothing else.
"""

from barrel_inference.protocol import CREDIT_EVENTS


class Credit:
    """The account of one stream."""

    def __init__(self) -> None:
        self._used = 0

    def first_grant(self, unread: int) -> int:
        """Events to grant with a request, when `unread` ones of an earlier attempt still wait for the reader."""
        self._used = -unread  # reading those frees nothing of what is granted now
        return CREDIT_EVENTS

    def took(self, events: int) -> int:
        """The reader took that many; how many to grant now (0: not yet)."""
        self._used += events
        if self._used < CREDIT_EVENTS // 2:
            return 0
        granted, self._used = self._used, 0
        return granted
