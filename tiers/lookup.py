"""The answer to a lookup: what of a prompt a tree holds, and how that was found. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from barrel_inference.protocol import Namespace
from barrel_inference.tiers import key as keys
from barrel_inference.tiers.prefix_tree import Step, Tree
from barrel_inference.tiers.stored import bytes_inside


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to a lookup."""

    steps: tuple[Step, ...]
    via: str  # exact, parent, longest, none
    parent_tokens: int  # tokens that the given parent key stands for; 0 = it is no prefix of the prompt, or unknown
    miss_reason: str | None
    divergence_byte: int | None


def look_up(tree: Tree | None, namespace: Namespace, text: bytes, parent_key: bytes | None) -> Found:
    """The longest prefix of `text` in the tree of its namespace; a parent key says where to look, never what is there."""
    if tree is None or not tree.roots:
        return Found((), "none", 0, "no_entry", None)
    steps = tuple(tree.match(text))
    matched = sum(step.matched_bytes for step in steps)
    parent_tokens = _parent_tokens(parent_key, steps)
    via = "none"
    if steps:
        is_whole = matched == len(text) and _is_named(steps[-1], keys.key_of(namespace, text))
        is_parent = parent_tokens and parent_tokens >= _whole_tokens(steps[-1])
        via = "exact" if is_whole else "parent" if is_parent else "longest"
    divergence = matched if matched < len(text) else None
    return Found(steps, via, parent_tokens, None if steps else "diverged", divergence)


def _parent_tokens(parent_key: bytes | None, steps: Iterable[Step]) -> int:
    """The parent's length, if its bytes are a prefix of the prompt: then it lies on the matched path."""
    for step in steps if parent_key is not None else ():
        if step.node.key == parent_key:
            return step.node.end_tokens if step.matched_bytes == len(step.node.text) else 0
        for mark in step.node.marks:
            if mark.key == parent_key:
                return mark.tokens if bytes_inside(step.node, mark.tokens) <= step.matched_bytes else 0
    return 0


def _is_named(last: Step, key: bytes) -> bool:
    """Is the end of a match a node's end or a mark?"""
    return last.node.key == key or any(mark.key == key for mark in last.node.marks)


def _whole_tokens(last: Step) -> int:
    """Tokens of a match, from the root, that are matched to their end."""
    if last.matched_bytes == len(last.node.text):
        return last.node.end_tokens
    tokens, left = last.node.start_tokens, last.matched_bytes
    for length in keys.unpack_u32(last.node.token_bytes):
        left -= length
        if left < 0:
            break
        tokens += 1
    return tokens
