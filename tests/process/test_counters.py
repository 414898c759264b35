"""Every counter of the public list is really counted, by the event that it is named after."""

import contextlib
from collections.abc import Iterator

import zmq

from barrel_inference import Client, Runtime
from barrel_inference.workers.index import COUNTERS
from tests.process.caching import CONFIG, L12, T12, ask, files_of, load, saved
from tests.process.killing import came_back, kill, wait_for

QUOTA_BYTES = 64 * 1024


@contextlib.contextmanager
def moves(client: Client, *names: str) -> Iterator[None]:
    """What is done inside moves these counters."""
    before = client.counters()
    yield

    def still() -> list[str]:
        after = client.counters()
        return [name for name in names if after[name] <= before[name]]

    wait_for(lambda: not still(), f"moved by this: {names}", 10)
    unmoved.difference_update(names)


unmoved: set[str] = set()


def test_every_counter_moves() -> None:
    """None of the fixed names stays at 0 when what it counts happens."""
    unmoved.clear()
    unmoved.update(COUNTERS)
    tiers = CONFIG["tiers"] | {"ram": {"quota_bytes": QUOTA_BYTES}}
    with Runtime(CONFIG | {"tiers": tiers}) as runtime, runtime.client() as client:
        assert set(client.counters()) == set(COUNTERS)
        assert not any(client.counters().values())
        requests(client)
        sessions(client)
        damage(runtime, client)
        with moves(client, "restarts"):
            came_back(runtime, "writer:0", kill(runtime, "writer:0"))
        with moves(client, "messages_rejected"), zmq.Context() as context:
            socket = context.socket(zmq.DEALER)
            socket.connect(runtime.endpoint)
            socket.send_multipart([b"", b"no header", b""])
            socket.close(linger=1000)
    assert not unmoved


def requests(client: Client) -> None:
    """What single requests count."""
    model = load(client, policy={"continued_interval": 4})
    with moves(client, "misses", "saves_cold", "saves_finish", "tokens_prefilled", "pack_total_ns", "bytes_ram"):
        saved(client, client.complete(model, L12, response_tokens=2))
    with moves(client, "hits_exact", "hits_live", "tokens_reused"):
        client.complete(model, L12, response_tokens=0)
    with moves(client, "load_total_ns"):
        ask(client, model, L12, tokens=2)
    with moves(client, "hits_longest_prefix", "longest_prefix_probes", "longest_prefix_ns", "saves_continued"):
        parent = ask(client, model, f"{L12} 70", tokens=9)
    with moves(client, "hits_resume"):
        ask(client, model, [*parent.context_tokens, 5], tokens=1, parent_key=parent.finish_key)
    with moves(client, "saves_agent_prefix"):
        ask(client, model, range(200, 220), prefix_checkpoint_len=8)
    with moves(client, "saves_dropped", "evictions"):
        client.complete(model, range(1000, 6000), response_tokens=1)
    client.unload(model)


def sessions(client: Client) -> None:
    """What sessions count, and giving one up."""
    # The requests themselves save nothing, so that something is left for what ends the session and the model.
    model = load(client, tier="ram_file", policy={"min_tokens": 10_000, "min_reuse_tokens": 4})
    with moves(client, "hits_sticky"):
        first = client.complete(model, T12, session_id="s", response_tokens=2)
        client.complete(model, [*first.context_tokens, 3], session_id="s", response_tokens=2)
    with moves(client, "hits_sticky_partial"):
        client.complete(model, [*T12, 90, 91], session_id="s", response_tokens=2)
    with moves(client, "hits_continuation"):
        client.continue_(model, [7], session_id="s", response_tokens=2)
    with moves(client, "saves_evict", "bytes_ram_file"):
        client.complete(model, range(300, 310), response_tokens=2)
    with moves(client, "saves_shutdown"):
        client.unload(model)


def damage(runtime: Runtime, client: Client) -> None:
    """What files count."""
    model = load(client, tier="disk")
    with moves(client, "bytes_disk", "bytes_written_disk"):
        ask(client, model, T12)
    with moves(client, "duplicate_dropped"):  # a file that nobody knows turns out to be what was to be written
        images = {path: path.read_bytes() for path in files_of(runtime, "disk")}
        client.cache.gc()
        for path, image in images.items():
            path.write_bytes(image)
        ask(client, model, T12)
    with moves(client, "corrupt_files"):
        for path in files_of(runtime, "disk"):
            path.write_bytes(bytes(path.stat().st_size))
        ask(client, model, T12)
