"""What becomes of answers when stored files are damaged, removed or replaced: they are the cold ones, and it is saved again.

BARREL_TEST_FLIPS says how many bytes are flipped, one at a time; `make soak` asks for 500.
"""

import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from barrel_inference import Client, Runtime
from barrel_inference.results import Completion
from barrel_inference.tiers import kvc
from tests.process.caching import (
    CONFIG,
    FILE_TIERS,
    L12,
    TIERS,
    ask,
    check_books,
    files_of,
    load,
    moved,
    root_of,
    rows,
    saved,
)

FLIPS = int(os.environ.get("BARREL_TEST_FLIPS", "40"))
BLOCK_TOKENS = 8  # so that a short prompt is a chain of several files
PROMPT = [number * 37 % 1000 for number in range(30)]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    """One tree for the module; each test loads models of its own."""
    with Runtime(CONFIG | {"cache": {"block_tokens": BLOCK_TOKENS}}) as made:
        yield made


@pytest.fixture(scope="module")
def client(runtime: Runtime) -> Iterator[Client]:
    """A client of it."""
    with runtime.client() as made:
        yield made


@pytest.fixture(autouse=True)
def _balanced(runtime: Runtime, client: Client) -> Iterator[None]:
    """After each test the books are right; its rows go, so that the next one's damage is its own."""
    yield
    check_books(client, runtime)
    client.cache.gc()


def ask_again(client: Client, model: str, cold: Completion) -> Completion:
    """The same request; its answer has to be the same, and in the end everything is stored again."""
    again = ask(client, model, PROMPT)
    assert (again.generated, again.context_tokens) == (cold.generated, cold.context_tokens)
    assert again.finish_key == cold.finish_key
    return again


# --- one byte ---------------------------------------------------------------------------------------------------------


def files_of_prompt(runtime: Runtime, client: Client, model: str, tier: str) -> list[Path]:
    """The files that the prompt is read from, its beginning first."""
    nodes = sorted((row.tokens, row.location) for row in rows(client, model) if row.tokens <= len(PROMPT))
    return [root_of(runtime, tier) / location for _tokens, location in nodes]


@pytest.mark.parametrize("tier", FILE_TIERS)
def test_one_flipped_byte(runtime: Runtime, client: Client, tier: str) -> None:
    """A flipped byte anywhere: the same answer; what was damaged is counted once and saved again, and the next one is warm."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = load(client, tier=tier, bytes_per_token=512)
    cold = ask(client, model, PROMPT)
    for flip in range(FLIPS // 2):
        path = rng.choice(files_of_prompt(runtime, client, model, tier))
        size_bytes = path.stat().st_size
        place = rng.randrange(size_bytes)
        flip_bit(path, place, rng.randrange(8))
        before = client.counters()
        again = ask_again(client, model, cold)
        where = f"flip {flip} of seed {seed}: byte {place} of {size_bytes} in {path.name}"
        if place < size_bytes - kvc.TRAILER_BYTES:
            assert moved(client, before)["corrupt_files"] == 1, where
            assert again.cache_hit_kind in ("cold", "partial"), where
            assert again.miss_reason == "unreadable", where
        else:  # recency, hits, marks: nobody's answer depends on them
            assert again.cache_hit_kind == "exact", where
        assert ask_again(client, model, cold).cache_hit_kind == "exact", where
    client.unload(model)


def flip_bit(path: Path, place: int, bit: int = 0) -> None:
    """Change one byte of a file where it is."""
    with path.open("r+b") as file:
        file.seek(place)
        [old] = file.read(1)
        file.seek(place)
        file.write(bytes([old ^ 1 << bit]))


@pytest.mark.parametrize("tier", FILE_TIERS)
def test_a_byte_that_flips_while_nobody_runs(tmp_path: Path, tier: str) -> None:
    """Damage in header, metadata or payload that happened while the runtime was down: the cold answer, saved again."""
    config = CONFIG | {"cache": {"block_tokens": BLOCK_TOKENS}}
    try:
        with Runtime(config, state_dir=tmp_path) as runtime, runtime.client() as client:
            cold = ask(client, load(client, tier=tier, name="m", bytes_per_token=512), PROMPT)
        # The start of the node, its metadata, its payload.
        for path, place in zip(files_of(runtime, tier), itertools.cycle((20, 300, 1500)), strict=False):
            flip_bit(path, place)
        with Runtime(config, state_dir=tmp_path) as runtime, runtime.client() as client:
            model = load(client, tier=tier, name="m", bytes_per_token=512)
            again = saved(client, client.complete(model, PROMPT, response_tokens=4))
            assert (again.generated, again.cache_hit_kind) == (cold.generated, "cold")
            assert ask_again(client, model, cold).cache_hit_kind == "exact"
            check_books(client, runtime)
    finally:
        shutil.rmtree(root_of(runtime, "ram_file"), ignore_errors=True)


# --- whole files ------------------------------------------------------------------------------------------------------


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def _replace(path: Path) -> None:
    fresh = path.with_name("fresh")
    fresh.write_bytes(os.urandom(path.stat().st_size))
    fresh.replace(path)


def _link_elsewhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def _make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _swap(path: Path) -> None:
    """Another valid image under this name."""
    other = next(other for other in path.parent.parent.rglob("*.kvc") if other != path)
    shutil.copy(other, path)


def _remove_shard(path: Path) -> None:
    shutil.rmtree(path.parent)


DAMAGES = (Path.unlink, _truncate, _extend, _replace, _link_elsewhere, _make_directory, _swap, _remove_shard)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
@pytest.mark.parametrize("tier", FILE_TIERS)
def test_damaged_files(
    runtime: Runtime, client: Client, tier: str, damage: Callable[[Path], None], place: int
) -> None:  # fmt: skip
    """The first or last file of a prompt removed, cut, extended, replaced: the same answer, and the third one is warm."""
    model = load(client, tier=tier)
    cold = ask(client, model, PROMPT)
    before = client.counters()
    damage(files_of_prompt(runtime, client, model, tier)[place])
    first = ask_again(client, model, cold)
    assert first.cache_hit_kind == ("cold" if place == 0 else "partial")
    assert moved(client, before)["corrupt_files"] >= 1
    assert (again := ask_again(client, model, cold)).cache_hit_kind == "exact"
    assert again.hit_source == tier
    client.unload(model)
    client.cache.gc()  # what else lay there is missed by the next sweep only


def test_a_row_is_promised_only_when_it_is_there(runtime: Runtime, client: Client) -> None:
    """Corrupted behind an available row: first repeat cold, saved again with its key, third repeat warm."""
    model = load(client, tier="disk")
    cold = ask(client, model, L12)
    for path in set(files_of_prompt(runtime, client, model, "disk")):
        path.write_bytes(b"\0" * path.stat().st_size)
    kinds = []
    for _ in range(3):
        result = ask(client, model, L12)
        assert (result.generated, result.finish_key) == (cold.generated, cold.finish_key)
        kinds.append(result.cache_hit_kind)
    assert kinds == ["cold", "exact", "exact"]
    client.unload(model)


@pytest.mark.parametrize("tier", TIERS)
def test_a_state_that_cannot_be_computed_on(client: Client, tier: str) -> None:
    """Cells that import well and make every decode fail: that entry goes, and the same request is computed cold."""
    model = load(client, tier=tier, poisoned_imports=True)
    cold = ask(client, model, L12)
    before = client.counters()
    again = ask(client, model, L12)
    assert (again.generated, again.cache_hit_kind, again.miss_reason) == (cold.generated, "cold", "unreadable")
    assert moved(client, before)["corrupt_files"] >= 1
    client.unload(model)


def test_a_root_that_was_emptied(runtime: Runtime, client: Client) -> None:
    """All files of a tier removed at once, its directories too: cold answers, and everything can be saved again."""
    model = load(client, tier="disk")
    cold = ask(client, model, PROMPT)
    for path in root_of(runtime, "disk").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    assert ask_again(client, model, cold).cache_hit_kind == "cold"
    assert ask_again(client, model, cold).cache_hit_kind == "exact"
    client.unload(model)
