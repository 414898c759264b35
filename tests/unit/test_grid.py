"""What a deterministic context shares: whole blocks with everybody, a tail with the identical prompt (workers/model/grid.py)."""

import pytest

from barrel_inference.workers.model.chain import NO_SEAM, Seam
from barrel_inference.workers.model.grid import live_part, savable, stored_part, without_logits

GRID = 16


@pytest.mark.parametrize(
    ("matched", "ends", "prompt", "has_snapshots", "want"),
    [
        (40, [16, 32, 40], 40, False, 40),  # the identical prompt
        (40, [16, 32, 40], 41, False, 32),  # one that goes on: the tail's last token was computed alone
        (40, [16, 32, 44], 40, False, 32),  # another prompt's tail
        (48, [16, 32, 48], 48, False, 48),  # ends on the grid: a whole block like any other
        (48, [16, 32, 48], 60, False, 48),
        (48, [16, 30, 32, 48], 48, False, 16),  # no whole block after what is none
        (40, [16, 32, 39, 40], 40, True, 40),  # with the state before the last token
        (40, [16, 32, 40], 40, True, 32),
        (40, [16, 32, 39, 40], 40, False, 32),
        (33, [16, 32, 33], 33, True, 33),  # the last token alone is all that is left
        (50, [16, 32, 48, 50], 40, False, 32),  # generated before a resubmission: no part of the prompt
        (45, [16, 32, 40, 45], 40, False, 40),
        (9, [16], 9, False, 0),
    ],
)
def test_stored_part(matched: int, ends: list[int], prompt: int, has_snapshots: bool, want: int) -> None:
    """Of a stored match the whole blocks count, and the tail when the prompt is identical and was cut alike."""
    got = stored_part(Seam(matched, matched, False), ends, prompt, GRID, has_snapshots=has_snapshots)
    assert got == (Seam(want, want, False) if want else NO_SEAM)


def test_what_was_split_differently_is_no_match() -> None:
    """Equal text in other tokens was computed from other tokens."""
    seam = Seam(40, 41, True)
    assert stored_part(seam, [16, 32, 40], 40, GRID, has_snapshots=False) == NO_SEAM
    assert live_part(seam, 40, 40, GRID) == NO_SEAM


@pytest.mark.parametrize(
    ("matched", "held_prompt", "prompt", "want"),
    [
        (40, 40, 40, 40),
        (60, 40, 70, 32),
        (40, 50, 40, 32),
        (48, 48, 60, 48),
        (60, 48, 60, 48),
        (45, 40, 40, 40),
        (9, 9, 20, 0),
    ],
)
def test_live_part(matched: int, held_prompt: int, prompt: int, want: int) -> None:
    """Of a session's own sequence the whole blocks of its last prompt count, all of it when that was the same prompt."""
    got = live_part(Seam(matched, matched, False), held_prompt, prompt, GRID)
    assert got == (Seam(want, want, False) if want else NO_SEAM)


@pytest.mark.parametrize(
    ("length", "prompt", "want"), [(60, 40, 40), (40, 40, 40), (39, 40, 32), (60, 48, 48), (9, 40, 0)]
)
def test_savable(length: int, prompt: int, want: int) -> None:
    """The whole prompt once it is computed, whole blocks before that, and nothing that was generated."""
    assert savable(length, prompt, GRID) == want


def test_without_the_last_row() -> None:
    """One token is computed again, and is reused all the same; on the grid the whole block is, and is not."""
    assert without_logits(Seam(40, 40, False), GRID) == (Seam(40, 40, False), 39)
    assert without_logits(Seam(48, 48, False), GRID) == (Seam(32, 32, False), 32)
    assert without_logits(Seam(48, 48, False), 0) == (Seam(48, 48, False), 47)
    assert without_logits(Seam(16, 16, False), GRID) == (NO_SEAM, 0)
