"""Names of image files, and what a name found in a directory is. Pure.

`<2 hex>/<key in hex>.kvc` is a complete image; the two digits are the key's first, so that no directory gets huge.
`<2 hex>/<key in hex>.kvc.<pid>.<token>.tmp` is one that the writer with that process id is making.
"""

import re
from typing import NamedTuple

_NAME = re.compile(r"([0-9a-f]{64})\.kvc(?:\.([0-9]{1,10})\.([0-9]{1,20})\.tmp)?")


class Found(NamedTuple):
    """An image file by its name."""

    key: bytes
    writer_pid: int | None  # None: complete


def shard_of(key: bytes) -> str:
    """The directory of a key's file."""
    return key[:1].hex()


def file_name(key: bytes) -> str:
    """The path of a key's file below the root."""
    return f"{shard_of(key)}/{key.hex()}.kvc"


def temp_name(key: bytes, pid: int, token: int) -> str:
    """The name, within its directory, of a file on its way to `file_name(key)`."""
    return f"{key.hex()}.kvc.{pid}.{token}.tmp"


def parse(shard: str, name: str) -> Found | None:
    """What a directory entry is; None = not ours."""
    match = _NAME.fullmatch(name)
    if match is None or not name.startswith(shard):
        return None
    return Found(bytes.fromhex(match[1]), int(match[2]) if match[2] else None)


def key_of(name: str) -> bytes | None:
    """The key of a complete file by its path below the root; None = no such path."""
    shard, _, base = name.partition("/")
    found = parse(shard, base) if len(shard) == 2 else None
    return found.key if found is not None and found.writer_pid is None else None
