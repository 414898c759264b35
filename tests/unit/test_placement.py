"""Which sequence a request gets and what it reuses (workers/model/placement.py, sequences.py)."""

from collections.abc import Callable
from typing import Any

import pytest

from barrel_inference.protocol import Complete, HitKind
from barrel_inference.workers.model.chain import Seam
from barrel_inference.workers.model.job import Job, Stage, Times
from barrel_inference.workers.model.placement import Abilities, How, Placement, hit_kind, live_reach, place
from barrel_inference.workers.model.sequences import SequenceTable, Use
from barrel_inference.workers.model.text import Scanner


def rendered(token: int) -> bytes:
    return b"%d " % token


def job(prompt: list[int], *, session: str | None = None, salt: bytes = b"", name: str = "r") -> Job:
    spec = Complete(prompt=prompt, session_id=session)
    return Job(name, spec, prompt, salt, 0, 10, Scanner(), Times(0.0))


def able(can_share: bool = True, can_cut: Callable[[int, int], bool] = lambda _s, _n: True) -> Abilities:
    return Abilities(can_share, can_cut, min_reuse_tokens=4)


def table(*held: tuple[Use, list[int]], session: str | None = None) -> SequenceTable:
    made = SequenceTable.of(len(held))
    for s, (use, tokens) in zip(made.sequences, held, strict=True):
        s.use, s.tokens = use, list(tokens)
        s.session = session if use is Use.PINNED else None
        made.touch(s.id)
    return made


HEAD = list(range(10, 30))


def test_warm_sequence_that_the_prompt_extends_is_taken_over() -> None:
    """Nothing is lost by going on in the same sequence, so nothing is copied."""
    got = place(job([*HEAD, 1, 2]), table((Use.WARM, HEAD), (Use.FREE, [])), [], rendered, 0, able())
    assert got == Placement(How.KEEP, 0, 0, Seam(20, 20, False))


def test_diverging_prompt_shares_and_leaves_the_rest_warm() -> None:
    """With another sequence free, the head is shared and the other conversation keeps its cells."""
    got = place(job([*HEAD[:12], 1, 2]), table((Use.WARM, HEAD), (Use.FREE, [])), [], rendered, 0, able())
    assert (got.how, got.target, got.source, got.seam.stored_tokens) == (How.SHARE, 1, 0, 12)


def test_only_sequence_is_cut_to_the_common_prefix() -> None:
    """With one sequence the common prefix is kept and the rest given up."""
    got = place(job([*HEAD[:12], 1, 2]), table((Use.WARM, HEAD)), [], rendered, 0, able())
    assert (got.how, got.seam.stored_tokens) == (How.KEEP, 12)


def test_stored_prefix_that_reaches_further_wins() -> None:
    """The longest match counts; on a tie the live one."""
    prompt = [*HEAD, 1, 2]
    short = table((Use.WARM, HEAD[:8]), (Use.FREE, []))
    assert place(job(prompt), short, [], rendered, 15, able()).stored
    tie = table((Use.WARM, HEAD), (Use.FREE, []))
    assert not place(job(prompt), tie, [], rendered, 20, able()).stored


def test_never_another_tenants_sequence() -> None:
    """Equal tokens of another tenant are no match."""
    got = place(job([*HEAD, 1], salt=b"b"), table((Use.WARM, HEAD), (Use.FREE, [])), [], rendered, 0, able())
    assert got == Placement(How.CLEAR, 1)


def test_busy_sequence_can_be_shared_from() -> None:
    """A prefix that runs in another request is copied as far as it is computed."""
    got = place(job([*HEAD, 9]), table((Use.BUSY, HEAD), (Use.FREE, [])), [], rendered, 0, able())
    assert (got.how, got.source, got.target) == (How.SHARE, 0, 1)


def test_followers_wait_for_the_leader() -> None:
    """A request whose head is being computed by another waits instead of computing it too."""
    leader = job([*HEAD, 1], name="leader")
    leader.begin_context([], [*HEAD, 1])
    leader.stage, leader.seq = Stage.PREFILLING, 0
    sequences = table((Use.BUSY, HEAD[:5]), (Use.FREE, []))
    assert place(job([*HEAD, 2]), sequences, [leader], rendered, 0, able()).how is How.FOLLOW
    sequences[0].tokens = [*HEAD, 1]
    assert place(job([*HEAD, 2]), sequences, [leader], rendered, 0, able()).how is How.SHARE


def test_session_keeps_its_common_prefix() -> None:
    """A diverging prompt of a session goes on from the common prefix in the session's own sequence."""
    got = place(job([*HEAD[:9], 1], session="a"), table((Use.PINNED, HEAD), session="a"), [], rendered, 0, able())
    assert (got.how, got.seam.stored_tokens, got.sticky) == (How.KEEP, 9, True)


def test_session_below_the_minimum_is_cold() -> None:
    """Two common tokens are not worth reporting as a hit."""
    got = place(job([*HEAD[:2], 1, 2, 3], session="a"), table((Use.PINNED, HEAD), session="a"), [], rendered, 0, able())
    assert got == Placement(How.CLEAR, 0)


def test_full_house() -> None:
    """An idle session is reclaimed for a newcomer; when all are busy it waits."""
    assert place(job([1, 2]), table((Use.PINNED, HEAD), session="a"), [], rendered, 0, able()).how is How.RECLAIM
    assert place(job([1, 2]), table((Use.BUSY, HEAD)), [], rendered, 0, able()).how is How.WAIT


def test_sequence_that_cannot_be_cut_is_not_used() -> None:
    """A window or recurrent sequence is only continued where that is exact."""
    nowhere = able(can_share=False, can_cut=lambda _s, _n: False)
    assert place(job([*HEAD[:12], 1]), table((Use.WARM, HEAD)), [], rendered, 0, nowhere) == Placement(How.CLEAR, 0)
    assert place(job([*HEAD, 1]), table((Use.WARM, HEAD)), [], rendered, 0, nowhere).how is How.KEEP


@pytest.mark.parametrize(
    ("sticky", "stored", "reused", "prompt", "held", "kind"),
    [
        (False, 0, 0, 10, 0, HitKind.COLD),
        (False, 10, 10, 10, 10, HitKind.EXACT),
        (False, 8, 8, 10, 8, HitKind.PARTIAL),
        (True, 8, 8, 10, 8, HitKind.STICKY),
        (True, 8, 8, 10, 12, HitKind.PARTIAL),
        (True, 10, 10, 10, 12, HitKind.STICKY),
    ],
)
def test_hit_kinds(sticky: bool, stored: int, reused: int, prompt: int, held: int, kind: HitKind) -> None:
    """Each kind by what was reused, of what."""
    assert hit_kind(Placement(How.KEEP, 0, 0, Seam(stored, stored, False), sticky=sticky), reused, prompt, held) is kind


def test_table_invariants_hold() -> None:
    """A consistent table passes its own check; a free sequence with tokens does not."""
    made = table((Use.WARM, HEAD), (Use.FREE, []))
    made.check()
    made[1].tokens = [1]
    with pytest.raises(AssertionError):
        made.check()


@pytest.mark.parametrize(
    ("use", "kwargs", "reach"),
    [
        (Use.WARM, {}, 20),
        (Use.BUSY, {}, 20),
        (Use.BUSY, {"can_share": False}, 0),
        (Use.WARM, {"can_cut": lambda _s, _n: False}, 20),
        (Use.PINNED, {}, 20),
    ],
)
def test_how_far_live_cells_reach(use: Use, kwargs: dict[str, Any], reach: int) -> None:
    """What a save would have to exceed to be waited for: held cells count while they are exported; what cannot be cut, at its
    end only; what another request computes, if it can be shared."""
    live = table((use, HEAD), session="s")
    live[0].holds = 1
    session = "s" if use is Use.PINNED else None
    assert live_reach(job([*HEAD, 1, 2], session=session), live, rendered, able(**kwargs)) == reach
    assert live_reach(job([*HEAD[:12], 1], session=session), live, rendered, able(can_cut=lambda _s, _n: False)) == 0
    assert live_reach(job([*HEAD, 1, 2], session=session, salt=b"other"), live, rendered, able(**kwargs)) == 0
