"""Which grammars are not even given to llama.cpp. Pure.

Its parser and its matcher trust their input (all tried): 20,000 nested brackets end the process; `{20,3}` never ends; repetitions
are written out, so `("a"{2000}){2000}` is four million elements; and a run of elements that may all be empty, `b{1,2000}` with
`b ::= "x" | ""`, makes one token take half a minute. So the text is read here first, as far as these four need it.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

from barrel_inference.errors import GrammarFailed

MAX_GRAMMAR_BYTES = 65_536  # default of `limits.grammar_bytes`
MAX_NESTING = 500  # a generated schema may need some hundreds
MAX_RULES = 2_000
MAX_UNROLLED = 100_000  # elements after every repetition is written out
MAX_EMPTY_RUN = 200  # elements in a row that may all be empty; the matcher's work grows with the cube

_TOKEN = re.compile(
    r"""(?P<terminal>"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|!?<[^>\n]*>|\.)"""
    r"""|(?P<comment>\#[^\n]*)"""
    r"""|(?P<defines>::=)"""
    r"""|(?P<open>\()|(?P<close>\))|(?P<bar>\|)"""
    r"""|(?P<repeat>[*+?]|\{\s*(?P<low>\d*)\s*(?:,\s*(?P<high>\d*)\s*)?\})"""
    r"""|(?P<name>[A-Za-z0-9_-]+)""",
    re.DOTALL,
)
# What a JSON schema counts is written out while its grammar is made, before that can be looked at.
MAX_COUNT = 9_999
_COUNTS = frozenset(("minItems", "maxItems", "minLength", "maxLength"))
_PATTERN_COUNT = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
_EMPTY_LITERAL = '""'


@dataclass(slots=True)
class _Element:
    """One element of a sequence: a terminal, or a reference to a rule or a group."""

    refers_to: str | None  # None: a terminal
    weight: int  # elements that it is, written out
    may_be_empty: bool = False
    times: int = 1  # copies that a repetition makes of it


@dataclass(slots=True)
class _Body:
    """A rule's or a group's alternatives."""

    alternatives: list[list[_Element]] = field(default_factory=lambda: [[]])

    def weight(self) -> int:
        """Elements, written out."""
        return sum(element.weight for alternative in self.alternatives for element in alternative)


def check_grammar(text: str, *, max_bytes: int = MAX_GRAMMAR_BYTES) -> None:
    """Refuse a grammar that could hurt. What is merely wrong is left to llama.cpp's parser.

    Raises:
        GrammarFailed: with the limit and what was found.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise GrammarFailed("the grammar has half a character (a lone surrogate)") from None
    if not text.strip():
        raise GrammarFailed("the grammar is empty", hint="a grammar needs at least a rule: root ::= ...")
    if size > max_bytes:
        raise GrammarFailed(f"the grammar has {size} bytes, limit {max_bytes}", hint="raise limits.grammar_bytes")
    if "\0" in text:
        raise GrammarFailed("the grammar has a zero byte")
    bodies = _read(text)
    run = max(_empty_runs(bodies), default=0)
    if run > MAX_EMPTY_RUN:
        raise GrammarFailed(
            f"the grammar has {run} elements in a row that may all be empty, limit {MAX_EMPTY_RUN}",
            hint="repeat something that is never empty",
        )


def check_schema(text: str, *, max_bytes: int = MAX_GRAMMAR_BYTES) -> None:
    """Refuse a JSON schema whose grammar would be huge: its counts are written out while it is made.

    Raises:
        GrammarFailed: with the limit and what was found.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        raise GrammarFailed(f"the JSON schema has {size} bytes, limit {max_bytes}", hint="raise limits.grammar_bytes")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as bad:
        raise GrammarFailed(f"the JSON schema is no JSON: {bad}") from bad
    largest = max(_counts_of(parsed), default=0)
    if largest > MAX_COUNT:
        raise GrammarFailed(f"the JSON schema counts up to {largest}, limit {MAX_COUNT}")


def _counts_of(schema: object) -> Iterator[float]:
    """Every count in a schema, those of its patterns too."""
    waiting = [schema]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            waiting += item.values()
            yield from (item[key] for key in _COUNTS & item.keys() if isinstance(item[key], int | float))
            if isinstance(pattern := item.get("pattern"), str):
                yield from (int(digits) for pair in _PATTERN_COUNT.findall(pattern) for digits in pair if digits)


def _read(text: str) -> dict[str, _Body]:
    """Rules by name; groups get names that no rule can have."""
    tokens = [match for match in _TOKEN.finditer(text) if match.lastgroup != "comment"]
    bodies: dict[str, _Body] = {}
    open_bodies: list[_Body] = [
        _Body()
    ]  # the rule, then the groups in it; what stands before the first rule is wrong anyway
    unrolled = 0
    for token, follower in zip_longest(tokens, tokens[1:]):
        here = open_bodies[-1].alternatives
        if token["defines"]:
            continue
        if token["name"] and follower is not None and follower["defines"]:
            open_bodies = [bodies.setdefault(token["name"], _Body())]
            open_bodies[0].alternatives.append([])
        elif token["name"]:
            here[-1].append(_Element(token["name"], 1))
        elif token["terminal"]:
            here[-1].append(_Element(None, len(token[0]), may_be_empty=token[0] == _EMPTY_LITERAL))
        elif token["bar"]:
            here.append([])
        elif token["open"]:
            name = f"({token.start()}"
            bodies[name] = _Body()
            here[-1].append(_Element(name, 1))
            open_bodies.append(bodies[name])
        elif token["close"] and len(open_bodies) > 1:
            weight = open_bodies.pop().weight()
            open_bodies[-1].alternatives[-1][-1].weight = weight
        elif token["repeat"] and here[-1]:
            unrolled += _repeat(here[-1][-1], token)
        if len(open_bodies) > MAX_NESTING:
            raise GrammarFailed(f"the grammar nests more than {MAX_NESTING} brackets")
        if unrolled > MAX_UNROLLED:
            raise GrammarFailed(f"the grammar's repetitions stand for more than {MAX_UNROLLED} elements")
    rules = sum(not name.startswith("(") for name in bodies)
    if rules > MAX_RULES:
        raise GrammarFailed(f"the grammar has {rules} rules, limit {MAX_RULES}")
    return bodies


def _repeat(element: _Element, token: re.Match[str]) -> int:
    """Apply a repetition to an element; returns how many elements that makes."""
    sign = token["repeat"]
    low, high = (0, 1) if sign in "*?" else (1, 1) if sign == "+" else _bounds(token)
    element.may_be_empty |= low == 0
    element.times *= max(1, high)
    element.weight *= max(1, high)
    return element.weight


def _bounds(token: re.Match[str]) -> tuple[int, int]:
    low = int(token["low"] or 0)
    high = int(token["high"]) if token["high"] else low
    if high < low:
        raise GrammarFailed(f"the repetition {token[0]} ends before it begins")
    return low, high


def _empty_runs(bodies: dict[str, _Body]) -> Iterable[int]:
    """The longest run, in each alternative, of elements that may be empty, copies counted."""
    empty = _may_be_empty(bodies)
    for body in bodies.values():
        for alternative in body.alternatives:
            run = longest = 0
            for element in alternative:
                if element.refers_to in empty:
                    run += element.times  # every copy may be left out by itself
                elif element.may_be_empty:
                    run += 1
                else:
                    run = 0
                longest = max(longest, run)
            yield longest


def _may_be_empty(bodies: dict[str, _Body]) -> set[str]:
    """The rules and groups that match nothing at all, too."""
    empty: set[str] = set()
    grown = True
    while grown:
        grown = False
        for name, body in bodies.items():
            if name not in empty and any(
                all(element.may_be_empty or element.refers_to in empty for element in alternative)
                for alternative in body.alternatives[_first_alternative(name) :]
            ):
                empty.add(name)
                grown = True
    return empty


def _first_alternative(name: str) -> int:
    # A rule's first list is what `_Body` begins with, before the rule's own alternatives.
    return 0 if name.startswith("(") else 1
