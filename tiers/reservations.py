"""Room that was promised and not filled yet, and the byte account of every tier server. Pure.

A quota holds at every moment: what is stored and what is reserved together never exceed it.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from barrel_inference.protocol import Location, Namespace, NewNode, Tier

if TYPE_CHECKING:
    from hashlib import _Hash


@dataclass(slots=True)
class Account:
    """The bytes of one tier server."""

    server: str
    kind: Tier
    quota_bytes: int
    incarnation: int
    stored_bytes: int = 0
    reserved_bytes: int = 0
    rows: int = 0
    note: str = ""
    replayed: bool = False

    def lacks(self, size_bytes: int) -> int:
        """Bytes that have to go before `size_bytes` more can be promised; 0 = none."""
        return max(0, self.stored_bytes + self.reserved_bytes + size_bytes - self.quota_bytes)

    def check(self) -> None:
        """The account's invariants."""
        assert self.stored_bytes >= 0, self
        assert self.reserved_bytes >= 0, self
        assert self.rows >= 0, self


@dataclass(slots=True)
class Reservation:
    """One node on its way."""

    token: int
    namespace: Namespace
    model_id: str
    node: NewNode
    server: str
    owner: str
    owner_incarnation: int
    is_last: bool  # of its save: counted as the save when it is published
    digest: "_Hash"  # SHA-256 of the prefix that it ends, for what is reserved below it
    made_s: float = 0.0
    location: Location | None = None
    published: bool = False  # its bytes are complete, but its parent's are not yet
    writer: tuple[str, int] | None = None  # who has the image and can finish without the owner

    @property
    def end_tokens(self) -> int:
        """Tokens of the whole prefix."""
        return self.node.start_tokens + len(self.node.token_ids) // 4


@dataclass(slots=True)
class Reservations:
    """Every reservation, by token, by key and by the key of its parent."""

    by_token: dict[int, Reservation] = field(default_factory=dict)
    by_key: dict[bytes, Reservation] = field(default_factory=dict)
    last_token: int = 0
    _below: dict[bytes | None, dict[int, Reservation]] = field(default_factory=dict)

    def add(self, reservation: Reservation) -> None:
        """Note a reservation; its key must not be reserved already."""
        assert reservation.node.key not in self.by_key
        self.by_token[reservation.token] = reservation
        self.by_key[reservation.node.key] = reservation
        self._below.setdefault(reservation.node.parent_key, {})[reservation.token] = reservation

    def new_token(self) -> int:
        """A token that was never given before by this index."""
        self.last_token += 1
        return self.last_token

    def remove(self, token: int) -> Reservation | None:
        """Forget a reservation."""
        found = self.by_token.pop(token, None)
        if found is not None:
            del self.by_key[found.node.key]
            siblings = self._below[found.node.parent_key]
            del siblings[token]
            if not siblings:
                del self._below[found.node.parent_key]
        return found

    def of(self, owner: str, incarnation: int) -> list[Reservation]:
        """The reservations of one incarnation of a process."""
        return [r for r in self.by_token.values() if (r.owner, r.owner_incarnation) == (owner, incarnation)]

    def below(self, parent_key: bytes | None) -> list[Reservation]:
        """The reservations of this node's children."""
        return list(self._below.get(parent_key, {}).values())

    def has_below(self, parent_key: bytes) -> bool:
        """Is a child of this node on its way?"""
        return parent_key in self._below
