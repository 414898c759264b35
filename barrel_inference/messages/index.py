"""What the index answers: lookups, saves, counters, eviction. Pure."""

from barrel_inference.messages.base import Count, Key, Location, Message, Namespace, SaveReason


class Lookup(Message, frozen=True):
    """Call by a model: the longest stored prefix of `text` in a namespace.

    The reply claims its nodes until `CheckIn`, or until the caller's incarnation is down.
    """

    namespace: Namespace
    model_id: str
    text: bytes  # the rendered bytes of the prompt
    parent_key: Key | None = None
    wait_ms: Count = 0  # for an in-flight save of `parent_key`
    live_tokens: Count = 0  # what the caller has of the prompt; a save of no more is not waited for


class MatchedNode(Message, frozen=True):
    """One node on the path from the root, in order."""

    key: Key
    start_tokens: Count  # position of its first token
    token_ids: bytes  # u32 little-endian, one per token
    text_bytes: Count  # rendered bytes of this node
    matched_bytes: Count  # of those, how many are in the prompt; less than all in the last node only
    snapshot: bool  # holds the recurrent or window state at its end
    copies: list[Location]  # fastest first


class Match(Message, frozen=True):
    """Reply to `Lookup`: the path of nodes whose bytes the prompt shares; empty = nothing."""

    claim: int  # 0 = nothing claimed
    nodes: list[MatchedNode]
    via: str  # exact (whole-prompt key), parent (parent_key), longest, none
    miss_reason: str | None = None  # no_entry, diverged, index_rebuilding, ...
    divergence_byte: int | None = None  # first byte where the nearest stored text differs from the prompt
    parent_tokens: int = 0  # via parent: tokens that `parent_key` stands for


class CheckIn(Message, frozen=True):
    """Cast by a model: the claim is dropped; what became of it."""

    claim: int
    used_keys: list[Key] = []  # restored: their hits and recency move
    corrupt: list[tuple[Key, str]] = []  # (key, tier server): unreadable there; that copy goes


class SavePlan(Message, frozen=True):
    """Call by a model, before a save: which part of these tokens is stored as a chain of whole nodes already?"""

    namespace: Namespace
    token_ids: bytes  # u32 little-endian, the sequence from its start
    token_bytes: bytes  # u32 little-endian: the rendered length of each token
    text: bytes
    server: str = ""  # count what that one holds only; empty = anywhere


class Planned(Message, frozen=True):
    """Reply to `SavePlan`.

    `nodes`: key and end of each stored node along the tokens, from the root, with the servers that hold a copy.
    `inside_key` names a stored child that goes on past the last token with the same tokens: the save needs a mark in it
    and no bytes.
    """

    nodes: list[tuple[bytes, int, list[str]]]
    inside_key: bytes | None = None


class NewNode(Message, frozen=True):
    """One node to be stored."""

    key: Key
    parent_key: Key | None
    start_tokens: Count
    token_ids: bytes
    token_bytes: bytes  # u32 little-endian: the rendered length of each token
    text: bytes
    size_bytes: Count  # the whole image
    reason: SaveReason
    snapshot: bool = False
    pinned: bool = False


class Reserve(Message, frozen=True):
    """Call by a model: room for these nodes, root first, in one tier. Answers are per node, in order."""

    namespace: Namespace
    model_id: str
    server: str
    nodes: list[NewNode]


class Grant(Message, frozen=True):
    """Answer for one node: `granted` (with token and location), `already_present`, `conflict` (being written by another),
    `no_parent`, `no_space` (quota or headroom), `tier_down`, `bad_key`."""

    status: str
    token: int = 0
    location: Location | None = None


class Grants(Message, frozen=True):
    """Reply to `Reserve`."""

    grants: list[Grant]


class Handed(Message, frozen=True):
    """Cast by a writer that was handed an image: from here on its save does not need the model any more."""

    token: int
    writer: str


class CheckReservation(Message, frozen=True):
    """Call by a writer before it links: is the token still ours? `not_found` if not.

    A token of an index that has died is good: whether its place is, the tier says at the publication.
    """

    token: int


class Publish(Message, frozen=True):
    """Call by whoever wrote the bytes: the node is complete. An unknown token is an adoption, checked by the tier's scan."""

    token: int
    location: Location
    adopted: bool = False  # an equal file was there already; its own header counts


class Abort(Message, frozen=True):
    """Cast: the reservations will not be published; `reason` as in the counters (`dropped`, `failed`)."""

    tokens: list[int]
    reason: str = "dropped"


class AddMark(Message, frozen=True):
    """Call by a model: name a point inside or at the end of a stored node. Pinned: at most one per namespace."""

    namespace: Namespace
    key: Key
    node_key: Key
    tokens: Count  # from the root
    reason: SaveReason
    pinned: bool = False


class Counted(Message, frozen=True):
    """Cast by anyone: counters to add."""

    deltas: dict[str, int]


class Counters(Message, frozen=True):
    """Call: every counter."""


class CounterValues(Message, frozen=True):
    """Reply to `Counters`."""

    counters: dict[str, int]


class Dump(Message, frozen=True):
    """Call: rows of the index (nodes and marks), newest use first."""

    limit: int = 0  # 0 = all
    tier: str | None = None  # a kind, or a server's id


class DumpRow(Message, frozen=True):
    """One row."""

    key: bytes
    parent_key: bytes | None
    model_id: str
    tier: str
    size_bytes: int
    tokens: int
    text_bytes: int
    status: str  # available, writing
    reason: str
    hits: int
    refcount: int
    pinned: bool
    age_s: float
    location: str
    first_words: str = ""  # of the prompt


class DumpRows(Message, frozen=True):
    """Reply to `Dump`."""

    rows: list[DumpRow]


class CacheStats(Message, frozen=True):
    """Call: per tier server, its kind, quota, bytes stored and reserved, rows."""


class TierStats(Message, frozen=True):
    """One tier server's figures."""

    server: str
    kind: str
    quota_bytes: int
    stored_bytes: int
    reserved_bytes: int
    rows: int
    up: bool
    note: str = ""  # why the quota was lowered, or why the tier takes nothing


class CacheStatsReply(Message, frozen=True):
    """Reply to `CacheStats`."""

    tiers: list[TierStats]
    namespaces: int
    nodes: int
    marks: int


class Evict(Message, frozen=True):
    """Call: free at least `bytes` (None: everything unpinned and unclaimed), the least valuable rows first, from the tiers
    named by kind or by their server's id (None: all)."""

    bytes: int | None = None
    tiers: list[str] | None = None


class Evicted(Message, frozen=True):
    """Reply to `Evict`."""

    rows: int
    bytes: int
