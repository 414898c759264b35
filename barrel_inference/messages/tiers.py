"""What tiers and writers answer: rows, room, images to write. Pure."""

from barrel_inference.messages.base import Count, Key, Location, Message, Namespace, SaveReason, Tier


class StoredRow(Message, frozen=True):
    """One complete node as its image's header tells it: what a scan reports."""

    namespace: Namespace
    model_id: str
    key: Key
    parent_key: Key | None
    start_tokens: Count
    token_ids: bytes
    token_bytes: bytes
    text: bytes
    reason: SaveReason
    snapshot: bool
    created_unix_s: float
    last_used_unix_s: float
    hits: int
    marks: list[tuple[bytes, int, str, bool]]  # key, tokens from the root, reason, pinned
    pinned: bool
    location: Location


class Replay(Message, frozen=True):
    """Tier → index, call: the tier's complete rows, in batches after its start or the index's; `last` ends it."""

    server: str
    incarnation: int
    kind: Tier
    quota_bytes: int
    rows: list[StoredRow]
    leases: list[tuple[str, int, Location]]  # (owner id, owner incarnation, location) of images being written
    last: bool
    note: str = ""


class Quota(Message, frozen=True):
    """Tier → index, call: the quota has changed; what is stored above it has to go."""

    server: str
    incarnation: int
    quota_bytes: int
    note: str = ""


class Room(Message, frozen=True):
    """Index → tier, call: delete these, then make room for images of these sizes. One location per size, None = no space."""

    owner: str
    owner_incarnation: int
    deletes: list[Location]
    names: list[Key]
    sizes: list[int]
    give_back: bool = False  # True: deleted memory goes back to the system, not into the reuse pool


class Roomed(Message, frozen=True):
    """Reply to `Room`."""

    locations: list[Location | None]
    freed_bytes: int
    lacking_bytes: int = (
        0  # that would have to go for what got no place; 0: the medium takes nothing, or all was placed
    )


class Free(Message, frozen=True):
    """Index → tier, cast: these leased locations were given up."""

    locations: list[Location]


class Committed(Message, frozen=True):
    """Index → tier, cast: this leased location was published; it is a row now."""

    location: Location


class Touch(Message, frozen=True):
    """Index → tier, cast: recency, hits, marks and pin of a row, to be kept in the image's trailer."""

    location: Location
    last_used_unix_s: float
    hits: int
    marks: list[tuple[bytes, int, str, bool]]
    pinned: bool


class Lost(Message, frozen=True):
    """Tier → index, cast: these copies are gone or unreadable. `corrupt` counts in `corrupt_files`."""

    server: str
    keys: list[Key]
    corrupt: bool


class Adopt(Message, frozen=True):
    """Tier → index, call: a complete file found by the sweep that the index does not know."""

    row: StoredRow


class Write(Message, frozen=True):
    """Model → writer, call: publish this image in a file tier. Done (`Written`) when it is durable and in the index.

    The image lies in the model's staging arena (`<runtime dir>/<owner>.arena`, descriptor by SCM_RIGHTS) and is complete:
    header, payload and checksums.
    """

    token: int
    owner: str
    owner_incarnation: int
    offset: int
    size_bytes: int
    key: Key
    location: Location  # the tier, its incarnation and the file's name
    root: str


class Written(Message, frozen=True):
    """Reply to `Write`."""

    published: bool
    adopted: bool = False
