"""Lookups of a 30,000-token prompt among few and many stored nodes: what the index computes for one `Lookup` message.

Run: `python -P bench/lookup.py [NODES ...]`. Prints a table, one line per number of stored nodes: the whole prompt is stored,
its first half is, nothing of it is. Half of the other nodes lie in the prompt's own namespace, half in another one.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable

from barrel_inference import codec, protocol
from barrel_inference.protocol import Location, Namespace, SaveReason, StoredRow, Tier
from barrel_inference.tiers import key as keys
from barrel_inference.tiers.catalog import Catalog

PROMPT_TOKENS = 30_000
BLOCK_TOKENS = 256
CHAIN_NODES = 100  # nodes of each other conversation
REPEATS = 20
TIER = "tier:disk"
OWN, OTHER = (Namespace(bytes([fill]) * 32, "f16/16", b"\xbb" * 32) for fill in (0xAA, 0xCC))


def pieces_of(rng: random.Random, count: int) -> list[bytes]:
    """Random tokens as the stub engine renders them."""
    return [b"%d " % rng.randrange(100_000) for _ in range(count)]


def store(catalog: Catalog, space: Namespace, pieces: list[bytes]) -> None:
    """A conversation, as a tier reports it."""
    digest, parent = keys.start(space), None
    for start in range(0, len(pieces), BLOCK_TOKENS):
        block = pieces[start : start + BLOCK_TOKENS]
        text = b"".join(block)
        digest.update(text)
        key = digest.digest()
        row = StoredRow(
            namespace=space, model_id="bench", key=key, parent_key=parent, start_tokens=start,
            token_ids=keys.pack_u32(map(int, block)), token_bytes=keys.pack_u32(map(len, block)), text=text,
            reason=SaveReason.FINISH, snapshot=False, created_unix_s=0.0, last_used_unix_s=0.0, hits=0, marks=[],
            pinned=False, location=Location(TIER, 1, 6_000_000, 0, key.hex()),
        )  # fmt: skip
        catalog.restore_row(row, 0.0)
        parent = key


def answer(catalog: Catalog, text: bytes) -> int:
    """Everything that the index does for one lookup; the size of the reply."""
    found = catalog.lookup(OWN, text, None)
    claim = catalog.claim("model:bench", 1, found.steps)
    match = protocol.Match(
        claim=claim, nodes=catalog.wire_nodes(found), via=found.via, miss_reason=found.miss_reason,
        divergence_byte=found.divergence_byte, parent_tokens=found.parent_tokens,
    )  # fmt: skip
    size_bytes = len(codec.encode(match))
    catalog.release(claim)
    return size_bytes


def median_ms(action: Callable[[], object]) -> float:
    """The median time of an action."""
    times = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        action()
        times.append((time.perf_counter() - began_s) * 1000)
    return statistics.median(times)


def main(sizes: list[int]) -> int:
    """Print the table."""
    rng = random.Random(1)
    catalog = Catalog()
    catalog.stored.open_tier(TIER, Tier.DISK, 1 << 60, 1, "")
    prompt = pieces_of(rng, PROMPT_TOKENS)
    half = prompt[: PROMPT_TOKENS // 2] + pieces_of(rng, PROMPT_TOKENS // 2)
    store(catalog, OWN, prompt)
    prompts = {"stored": prompt, "first half stored": half, "not stored": pieces_of(rng, PROMPT_TOKENS)}
    print(f"{'stored nodes':>12}  " + "  ".join(f"{name + ' ms':>20}" for name in prompts) + "   lookup alone ms")
    for size in sizes:
        number = 0
        while len(catalog.stored.nodes) < size:
            # Some go on from the prompt's own head: siblings at the root, and further down.
            head = prompt[: rng.randrange(0, 20) * BLOCK_TOKENS]
            rest = pieces_of(rng, min(CHAIN_NODES, size - len(catalog.stored.nodes)) * BLOCK_TOKENS)
            store(catalog, (OWN, OTHER)[number % 2], head + rest)
            number += 1
        times = []
        for pieces in prompts.values():
            text = b"".join(pieces)
            times.append(median_ms(lambda text=text: answer(catalog, text)))  # type: ignore[misc]
        text = b"".join(prompt)
        alone = median_ms(lambda text=text: catalog.lookup(OWN, text, None))  # type: ignore[misc]
        columns = "  ".join(f"{ms:>20.2f}" for ms in times)
        print(f"{len(catalog.stored.nodes):>12}  {columns}  {alone:>16.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main([int(size) for size in sys.argv[1:]] or [1_000, 10_000, 100_000]))
