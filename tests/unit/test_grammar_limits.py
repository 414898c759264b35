"""Grammars that would end, hang or slow llama.cpp are refused before it sees them; ordinary ones pass."""

import json
import re

import pytest

from barrel_inference.errors import GrammarFailed
from barrel_inference.workers.model import grammar_limits
from barrel_inference.workers.model.grammar_limits import check_grammar, check_schema


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "yes" | "no"',
        'root ::= item+\nitem ::= "- " [a-z]+ "\\n" # a list\n',
        'root ::= ("a" ("b" ("c")?)?)*',
        'root ::= char{0,2000}\nchar ::= [^"\\\\] | "\\\\" ["\\\\/bfnrt]',
        'root ::= "\\"" "(" [^)]* ")" <[12]> !<[13]> .',
        "root ::= " + "(" * 400 + '"a"' + ")" * 400,
        'root ::= "{" ws "\\"a\\"" ws ":" ws "1" ws "}"\nws ::= [ \\t]*',
    ],
)
def test_ordinary_grammars_pass(grammar: str) -> None:
    """Nothing that people write is refused here."""
    check_grammar(grammar)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("", "empty"),
        (" \n\t", "empty"),
        ('root ::= "\0"', "zero byte"),
        ('root ::= "\ud800"', "surrogate"),
        ("root ::= " + "a" * 70_000, "limit 65536"),
        ("root ::= " + "(" * 501 + '"a"' + ")" * 501, "nests"),
        ('root ::= ("a"{2000}){2000}', "repetitions"),
        ('root ::= "' + "a" * 300 + '"{1000}', "repetitions"),
        ('root ::= "a"{20,3}', "{20,3}"),
        ('root ::= b{1,2000}\nb ::= "x" | ""', "may all be empty"),
        ('root ::= ("x"? "y"*){1,300}', "may all be empty"),
        ("root ::= " + 'a ("z"?) ' * 150 + '\na ::= "b"*', "may all be empty"),
        ("\n".join(f'r{n} ::= "a"' for n in range(2_001)), "rules"),
    ],
)
def test_dangerous_grammars_are_refused_with_the_limit(grammar: str, said: str) -> None:
    """The text says what was found."""
    with pytest.raises(GrammarFailed, match=re.escape(said)):
        check_grammar(grammar)


def test_a_limit_of_the_configuration_counts() -> None:
    """`limits.grammar_bytes` bounds the text."""
    with pytest.raises(GrammarFailed, match="limit 10"):
        check_grammar('root ::= "yes"', max_bytes=10)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("{", "no JSON"),
        ('{"x":' * 100_000, "no JSON"),
        ('{"items": {"maxItems": 100000}}', "100000"),
        ('{"anyOf": [{"maxLength": 1e300}]}', "counts up to"),
        ('{"pattern": "^a{2,1000000}$"}', "1000000"),
    ],
)
def test_schemas_that_would_be_written_out_hugely_are_refused(schema: str, said: str) -> None:
    """Counts are bounded before a grammar is made of them."""
    with pytest.raises(GrammarFailed, match=said):
        check_schema(schema, max_bytes=10**7)


def test_numbers_that_count_nothing_are_free() -> None:
    """A large minimum, or digits in a text, are no counts."""
    check_schema(json.dumps({"minimum": 10**9, "const": "x 123456 y", "maxItems": grammar_limits.MAX_COUNT}))
