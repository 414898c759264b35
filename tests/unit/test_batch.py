"""Which rows go into a decode call (workers/model/batch.py)."""

from hypothesis import given
from hypothesis import strategies as st

from barrel_inference.workers.model.batch import Slice, Want, plan


def test_decode_rows_come_before_slices() -> None:
    """A long prompt never takes the place of a token that someone waits for."""
    parts = plan([Want(0, 0, 500, 499), Want(1, 40, 1, 0)], n_batch=128, chunk=128)
    assert parts == [Slice(1, 40, 1, False), Slice(0, 0, 127, True)]


def test_slices_end_on_the_grid() -> None:
    """A slice that begins inside the grid goes up to its next multiple."""
    assert plan([Want(0, 100, 900, 899)], n_batch=512, chunk=128) == [Slice(0, 100, 28, True)]


def test_last_prompt_token_goes_alone() -> None:
    """With nothing left to prefill, the row that gets logits is a decode row."""
    assert plan([Want(0, 11, 1, 0)], n_batch=512, chunk=128) == [Slice(0, 11, 1, False)]


def test_rows_beyond_the_batch_wait_and_take_turns() -> None:
    """More generating sequences than rows: who comes first rotates, nobody starves."""
    wants = [Want(seq, 5, 1, 0) for seq in range(4)]
    served = {part.seq for first in range(4) for part in plan(wants, n_batch=2, chunk=2, first=first)}
    assert served == {0, 1, 2, 3}


@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 2000), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 512), st.integers(1, 512), st.integers(0, 20),
)  # fmt: skip
def test_plan_property(raw: list[tuple[int, int, bool]], n_batch: int, chunk: int, first: int) -> None:
    """Never more rows than the batch, never none, never a slice across the grid or past its prompt."""
    wants = [Want(seq, pos, ready, ready - 1 if prefill else 0) for seq, (pos, ready, prefill) in enumerate(raw)]
    parts = plan(wants, n_batch=n_batch, chunk=min(chunk, n_batch), first=first)
    assert 0 < sum(part.count for part in parts) <= n_batch
    by_seq = {want.seq: want for want in wants}
    for part in parts:
        want = by_seq[part.seq]
        assert part.position == want.position
        assert part.count <= max(1, want.prefill)
        grid = min(chunk, n_batch)
        assert not part.is_prefill or part.position // grid == (part.position + part.count - 1) // grid
