"""The number of threads follows what this process may use, not what the host has."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from barrel_inference.workers.model.cores import cores_within, leave_first_core, parse_cpu_max, places, usable_cores


@pytest.mark.parametrize(
    ("affinity", "quotas", "cores"),
    [
        (8, [], 8),
        (8, [(-1, 100_000)], 8),
        (8, [(0, 100_000)], 8),
        (8, [(200_000, 100_000)], 2),
        (8, [(150_000, 100_000)], 1),  # a second thread would be throttled half of the time
        (8, [(50_000, 100_000)], 1),
        (2, [(400_000, 100_000)], 2),
        (8, [(400_000, 100_000), (300_000, 100_000)], 3),  # a parent group may be tighter
    ],
)
def test_the_tightest_bound_counts(affinity: int, quotas: list[tuple[int, int]], cores: int) -> None:
    """Whole cores under affinity and every quota, at least one."""
    assert cores_within(affinity, quotas) == cores


@pytest.mark.parametrize(
    ("text", "pair"), [("max 100000\n", (-1, 100_000)), ("50000 100000", (50_000, 100_000)), ("7", (7, 100_000))]
)
def test_cpu_max_is_read(text: str, pair: tuple[int, int]) -> None:
    """Both spellings of cgroup v2, and a missing period."""
    assert parse_cpu_max(text) == pair


def test_this_process_has_a_core() -> None:
    """Whatever this machine's groups look like, the answer is a number of threads."""
    assert usable_cores() >= 1


@pytest.mark.parametrize(
    ("cores", "team", "working", "wanted"),
    [
        ([0, 1], 2, 2, [{0}, {1}]),
        ([4, 6], 3, 3, [{4}, {6}, {4}]),  # more threads than cores
        ([0, 1], 2, 1, [{0, 1}, {0, 1}]),  # the cores are shared with another model
        ([0, 1, 2, 3], 2, 2, [{0, 1, 2, 3}] * 2),  # there is room to move
        ([3], 1, 1, [{3}]),
    ],
)
def test_threads_are_placed_when_they_need_all_cores(
    cores: list[int], team: int, working: int, wanted: list[set[int]]
) -> None:
    """Each on its own then; otherwise where the kernel wants."""
    assert places(cores, team=team, working=working) == wanted


def test_a_thread_leaves_the_first_core_to_the_engine() -> None:
    """It and what it starts afterwards; who was there before stays where it was."""
    before = os.sched_getaffinity(0)

    def leave() -> set[int]:
        leave_first_core()
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as own:
        left = own.submit(leave).result()
    assert left == (set(sorted(before)[1:]) or before)
    assert os.sched_getaffinity(0) == before
