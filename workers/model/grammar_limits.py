"""Which grammars are not even given to llama.cpp's parser. Pure.

Its parser is recursive (20,000 nested brackets end the process), and it unrolls repetitions: `("a"{2000}){2000}` is four
million elements. Both are bounded here before it sees the text.
"""

import re

from barrel_inference.errors import GrammarFailed

MAX_GRAMMAR_BYTES = 65_536  # default of `limits.grammar_bytes`
MAX_NESTING = 500  # a generated schema may need some hundreds
MAX_RULES = 2_000
MAX_UNROLLED = 100_000  # elements after every repetition is written out

# What matters of a grammar's text; everything else counts as one element each.
_TOKEN = re.compile(
    r"""(?P<literal>"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])"""
    r"""|(?P<comment>\#[^\n]*)"""
    r"""|(?P<rule>::=)"""
    r"""|(?P<open>\()|(?P<close>\))"""
    r"""|\{\s*(?P<low>\d*)\s*(?:,\s*(?P<high>\d*)\s*)?\}"""
    r"""|(?P<name>[A-Za-z0-9_-]+)""",
    re.DOTALL,
)


def check_grammar(text: str, *, max_bytes: int = MAX_GRAMMAR_BYTES) -> None:
    """Refuse a grammar that could hurt.

    Raises:
        GrammarFailed: with the limit and what was found.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if not text.strip():
        raise GrammarFailed("the grammar is empty", hint="a grammar needs at least a rule: root ::= ...")
    if size > max_bytes:
        raise GrammarFailed(f"the grammar has {size} bytes, limit {max_bytes}", hint="raise limits.grammar_bytes")
    if "\0" in text:
        raise GrammarFailed("the grammar has a zero byte")
    _check_shape(text)


def _check_shape(text: str) -> None:
    rules = 0
    weights = [0]  # elements so far, per open bracket
    last = 0  # weight of the element that a repetition would apply to
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind == "rule":
            rules += 1
        elif kind == "open":
            weights.append(0)
            if len(weights) > MAX_NESTING:
                raise GrammarFailed(f"the grammar nests more than {MAX_NESTING} brackets")
        elif kind == "close" and len(weights) > 1:
            last = weights.pop()
            weights[-1] += last
        elif kind in ("literal", "name"):
            last = len(match.group()) if kind == "literal" else 1
            weights[-1] += last
        elif kind in ("low", "high"):
            weights[-1] += last * (_times(match) - 1)
        if sum(weights) > MAX_UNROLLED:
            raise GrammarFailed(f"the grammar's repetitions stand for more than {MAX_UNROLLED} elements")
    if rules > MAX_RULES:
        raise GrammarFailed(f"the grammar has {rules} rules, limit {MAX_RULES}")


def _times(match: re.Match[str]) -> int:
    """How often a repetition writes its element out, at least once."""
    return max(1, int(match["high"] or match["low"] or 1))
