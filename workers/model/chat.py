"""Chat messages to a prompt, by the model's own Jinja template, in a sandbox."""

import json
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from barrel_inference.errors import InvalidArgument, NotSupported

# A template that produces more is broken, or hostile.
MAX_RENDERED_BYTES = 64 * 1024 * 1024


class ChatTemplate:
    """A model's chat template, compiled once.

    Raises:
        NotSupported: the template does not compile.
    """

    def __init__(self, source: str, *, bos_text: str, eos_text: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special = {"bos_token": bos_text, "eos_token": eos_text}
        try:
            self._template = environment.from_string(source)
        except Exception as bad:  # a template is foreign code: what it nests too deep is no TemplateError
            raise NotSupported(f"the model's chat template does not compile: {bad}") from bad

    def render(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None, add_generation_prompt: bool
    ) -> bytes:
        """The prompt's text; the order of the messages is kept.

        Raises:
            InvalidArgument: the messages are not what the template takes.
        """
        if not messages:
            raise InvalidArgument("messages is empty", hint="send at least one message")
        for number, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise InvalidArgument(f"messages[{number}] has no role", hint='each needs "role" and "content"')
        try:
            data = self._template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self._special
            ).encode()
        except Exception as bad:  # foreign code on a caller's messages: whatever it raises is no reason to die
            why = str(bad) or type(bad).__name__
            raise InvalidArgument(f"the model's chat template refused the messages: {why}") from bad
        if len(data) > MAX_RENDERED_BYTES:
            raise InvalidArgument(f"the rendered chat has {len(data)} bytes, the limit is {MAX_RENDERED_BYTES}")
        return data


def _to_json(value: Any, indent: int | None = None, **_options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)
