"""Chat templates are foreign code: what one may do, and that nothing it does ends the model's process."""

from typing import Any

import pytest

from barrel_inference.errors import InvalidArgument, NotSupported
from barrel_inference.workers.model.chat import ChatTemplate


def rendered(source: str, tools: list[dict[str, Any]] | None = None) -> bytes:
    """What a template makes of one message."""
    template = ChatTemplate(source, bos_text="<s>", eos_text="</s>")
    return template.render([{"role": "user", "content": "hi"}], tools=tools, add_generation_prompt=True)


def test_a_template_sees_messages_and_special_tokens() -> None:
    """As models' own templates expect it."""
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] }}{% endfor %}{{ tools | tojson }}"
    assert rendered(source, [{"name": "f"}]) == b'<s>user: hi[{"name": "f"}]'


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('no system message, please') }}",
        "{{ 1 / 0 }}",
        "{{ 'a' * 10 ** 15 }}",
        "{{ range(10 ** 9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        '{{ "\\ud800" }}',
    ],
)
def test_what_a_template_may_not_do(source: str) -> None:
    """It reaches nothing but what it is given; whatever it raises is an error of the request."""
    with pytest.raises(InvalidArgument, match="chat template refused"):
        rendered(source)


def test_tools_that_nest_too_deep() -> None:
    """What a caller sends cannot make the template's filter end the process."""
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(InvalidArgument, match="chat template refused"):
        rendered("{{ tools | tojson }}", [deep])


def test_a_template_that_nests_too_deep() -> None:
    """It does not compile; the first chat is told so."""
    with pytest.raises(NotSupported, match="does not compile"):
        ChatTemplate("{{" + "(" * 100_000 + "}}", bos_text="", eos_text="")
