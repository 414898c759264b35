"""cache ls, stats, gc, evict."""

from typing import TYPE_CHECKING, Annotated

import typer

from barrel_inference.cli import context, output
from barrel_inference.cli.lifecycle import AsJson, Yes
from barrel_inference.results import CacheRow

if TYPE_CHECKING:
    from barrel_inference.client import Client

app = typer.Typer(no_args_is_help=True, help="Look into the cache, and make room in it.")

OneTier = Annotated[str | None, typer.Option("--tier", help="Only this tier: ram, ram_file, disk, or its server's id.")]


@app.command()
def ls(
    tier: OneTier = None,
    limit: Annotated[int, typer.Option(help="Rows at most; 0 = all.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Rows of the index, the latest used first.

    Example: barrelctl cache ls --tier disk --limit 20
    """
    with context.connected(timeout_s=60.0) as client:
        rows = client.cache.dump(limit=limit, tier=tier)
    if as_json:
        output.document(rows)
        return
    shown = [
        [
            row.key.hex()[:12], row.model_id, row.tier, row.tokens, output.size(row.size_bytes),
            output.duration(row.age_s), row.hits, row.reason, _state(row), row.first_words,
        ]
        for row in rows
    ]  # fmt: skip
    columns = ["key", "model", "tier", "tokens", "size", "age", "hits", "reason", "state", "prompt"]
    output.table(columns, shown, empty="the cache is empty")


def _state(row: CacheRow) -> str:
    """What keeps a row from being read, or from being evicted."""
    if row.status != "available":
        return row.status
    return "in use" if row.refcount else "pinned" if row.pinned else ""


@app.command()
def stats(as_json: AsJson = False) -> None:
    """Bytes by tier, and every counter.

    Example: barrelctl cache stats
    """
    with context.connected(timeout_s=10.0) as client:
        found, counters = client.cache.stats(), client.counters()
    if as_json:
        output.document({**found, "counters": counters})
        return
    rows = [
        [
            tier.server, output.state("ready" if tier.up else "failed"), output.size(tier.stored_bytes),
            output.size(tier.reserved_bytes), output.size(tier.quota_bytes), tier.rows, tier.note,
        ]
        for tier in found.tiers
    ]  # fmt: skip
    output.table(["tier", "state", "stored", "reserved", "quota", "rows", "note"], rows, empty="no cache tier is known")
    print(f"\n{found.nodes} nodes and {found.marks} marks in {found.namespaces} namespaces\n")
    output.table(["counter", "value"], [[name, value] for name, value in sorted(counters.items())], empty="no counters")


@app.command()
def gc(yes: Yes = False, as_json: AsJson = False) -> None:
    """Evict everything that is neither pinned nor in use, from every tier; asks first.

    Example: barrelctl cache gc --yes
    """
    with context.connected() as client:
        if output.can_ask() and (stored := _stored_bytes(client, None)):
            output.confirm(f"Evict everything, {output.size(stored)}? It has to be computed again.", yes=yes)
        rows = client.cache.gc()
    if as_json:
        output.document({"rows": rows})
    else:
        print(f"{rows} rows evicted")


@app.command()
def evict(
    amount: Annotated[str, typer.Argument(metavar="BYTES", help="At least so much, for example 256MiB.")],
    tier: OneTier = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Free at least BYTES, the least valuable rows first; asks first if that is all there is.

    Example: barrelctl cache evict 256MiB --tier ram
    """
    from barrel_inference.config_check import byte_size  # here, so that other commands do not wait for it

    wanted = byte_size(int(amount) if amount.isdecimal() else amount)
    with context.connected() as client:
        if output.can_ask() and 0 < (stored := _stored_bytes(client, tier)) <= wanted:
            output.confirm(f"Evict everything, {output.size(stored)}? It has to be computed again.", yes=yes)
        rows, freed = client.cache.evict_bytes(wanted, None if tier is None else [tier])
    if as_json:
        output.document({"rows": rows, "bytes": freed})
    else:
        print(f"{rows} rows evicted, {output.size(freed)} freed")


def _stored_bytes(client: "Client", tier: str | None) -> int:
    return sum(one.stored_bytes for one in client.cache.stats().tiers if tier in (None, one.kind, one.server))
