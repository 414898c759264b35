"""What a deterministic context computes alike for every prompt, and so may share and save. Pure.

Slices end on a grid of `grid_tokens`, where nodes end too (0: the context is not deterministic, there is no grid). A whole block
has the same bits in every prompt that has it. What comes after a prompt's last whole block has not: that slice is shorter,
and the last token is computed alone, for its logits. Such a tail serves the identical prompt only. A prompt that ends on the
grid has no tail: its last block is a slice like any other, and the slice's last row has the logits. They are stored with it,
as nothing short of the whole block would compute them again.

Generated tokens are computed one by one; a prompt that has them would compute them in slices.
"""

from collections.abc import Sequence
from itertools import takewhile

from barrel_inference.workers.model.chain import NO_SEAM, Seam


def ends_on_grid(prompt_tokens: int, grid_tokens: int) -> bool:
    """Is a prompt's last token computed in a slice with others, instead of alone?"""
    return grid_tokens > 0 and prompt_tokens % grid_tokens == 0


def savable(length: int, prompt_tokens: int, grid_tokens: int) -> int:
    """How much of a sequence's first `length` tokens may be saved: its whole prompt, or the whole blocks of it."""
    return prompt_tokens if length >= prompt_tokens else length // grid_tokens * grid_tokens


def stored_part(seam: Seam, ends: Sequence[int], prompt_tokens: int, grid_tokens: int, *, has_snapshots: bool) -> Seam:
    """How much of a stored match a prompt may go on from: whole blocks, or all of the identical prompt.

    Args:
        ends: where the matched nodes end.
        has_snapshots: are a prompt's last token and what comes before it nodes of their own?
    """
    if seam.retokenised:
        return NO_SEAM
    whole = _whole_blocks(seam.stored_tokens, prompt_tokens, grid_tokens)
    blocks = list(takewhile(lambda end: end <= whole and end % grid_tokens == 0, ends))
    length = blocks[-1] if blocks else 0
    before_last = [prompt_tokens - 1] if has_snapshots and prompt_tokens - 1 > length else []
    tail = [*before_last, prompt_tokens]
    is_identical = (
        length == whole
        and seam.stored_tokens >= prompt_tokens
        and list(ends[len(blocks) : len(blocks) + len(tail)]) == tail
    )
    return _seam(prompt_tokens if is_identical else length)


def live_part(seam: Seam, held_prompt_tokens: int, prompt_tokens: int, grid_tokens: int) -> Seam:
    """How much of what a sequence holds a prompt may go on from. `held_prompt_tokens`: of the sequence's own prompt."""
    if seam.retokenised:
        return NO_SEAM
    if seam.stored_tokens >= prompt_tokens == held_prompt_tokens:
        return _seam(prompt_tokens)
    return _seam(_whole_blocks(min(seam.stored_tokens, held_prompt_tokens), prompt_tokens, grid_tokens))


def without_logits(seam: Seam, grid_tokens: int) -> tuple[Seam, int]:
    """A match with a whole prompt whose last row is not known: what counts as reused, and how many tokens are kept of it.

    The last token is computed again, alone, and is reused all the same; on the grid all of its block is.
    """
    if not ends_on_grid(seam.caller_tokens, grid_tokens):
        return seam, seam.stored_tokens - 1
    keep = seam.stored_tokens - grid_tokens
    return _seam(keep), keep


def _whole_blocks(matched_tokens: int, prompt_tokens: int, grid_tokens: int) -> int:
    return min(matched_tokens, prompt_tokens) // grid_tokens * grid_tokens


def _seam(length: int) -> Seam:
    return Seam(length, length, False) if length else NO_SEAM
