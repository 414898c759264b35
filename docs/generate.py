"""Write the reference pages that follow from the code: `python docs/generate.py`; a test compares them.

Whole pages: cli.md, configuration.md, errors.md, file-format.md, load-options.md. In protocol.md and python.md the tables
between the two markers.
"""

import contextlib
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import typer

from barrel_inference import config, errors, protocol, request, results
from barrel_inference.cli.main import app
from barrel_inference.tiers import kvc
from barrel_inference.workers.model import options

REFERENCE = Path(__file__).parent / "reference"
# At the end: a page that does not begin with its heading has its file's name in the navigation.
NOTE = "\n<!-- Written by docs/generate.py. -->\n"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"


def cli() -> str:
    """Every command with its arguments, options and example."""
    group = typer.main.get_command(app)
    lines = ["# Commands", "", str(inspect.getdoc(group.callback)).replace("\n\n", "\n\n"), ""]
    for path, command in _commands("barrelctl", group):
        lines += [f"## `{path}`", "", *_help(command.help or ""), ""]
        rows = [_parameter(parameter) for parameter in command.params if parameter.name != "help"]
        if rows:
            lines += ["| argument | meaning |", "|---|---|", *rows, ""]
    return "\n".join(lines).rstrip() + "\n" + NOTE


def _commands(path: str, group: Any) -> Iterator[tuple[str, Any]]:
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from _commands(f"{path} {name}", command)
        else:
            yield f"{path} {name}", command


def _help(text: str) -> Iterator[str]:
    for line in inspect.cleandoc(text).splitlines():
        before, example, command = line.partition("Example: ")
        if not example:
            yield line
        else:
            yield from (before, "```sh", command, "```") if before else ("```sh", command, "```")


def _parameter(parameter: Any) -> str:
    name = (
        ", ".join(parameter.opts)
        if parameter.param_type_name == "option"
        else (parameter.metavar or parameter.name).upper()
    )
    return f"| `{name}` | {(parameter.help or '').replace('|', chr(92) + '|')} |"


def configuration() -> str:
    """The packaged sys.toml, and the type of each key."""
    lines = [
        "# sys.toml", "",
        "A file of your own is laid over these defaults, key by key.",
        "Every problem of a file is reported at once: `barrelctl config check FILE`.", "",
        "```toml", config.defaults_text().rstrip(), "```", "",
        "## Keys", "", "| key | type | taken up by a reload |", "|---|---|---|",
    ]  # fmt: skip
    lines += [f"| `{key}` | {kind} | {live} |" for key, kind, live in _keys(config.Settings, "")]
    return "\n".join(lines) + "\n" + NOTE


def _keys(struct: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, str, str]]:
    from barrel_inference.supervisor.reload import is_live  # the one fact about keys that the settings do not hold

    hints = typing.get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        hint, key = hints[field.name], prefix + field.name
        inner = typing.get_args(hint)[-1] if typing.get_origin(hint) is dict else hint
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            name = f"{key}.NAME." if inner is not hint else f"{key}."
            yield from _keys(inner, name)
        else:
            yield key, _kind(hint), "yes" if is_live(key) else "no"


def _kind(hint: Any) -> str:
    """A type in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        meta = arguments[1]
        limits = [
            f"{sign} {value}"
            for sign, value in (("≥", meta.ge), (">", meta.gt), ("≤", meta.le), ("<", meta.lt))
            if value is not None
        ]
        size = f"{meta.min_length} bytes" if meta.min_length == meta.max_length and meta.min_length else None
        return ", ".join([meta.title or _kind(arguments[0]), *([size] if size else []), *limits])
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("nil" if argument is type(None) else _kind(argument) for argument in arguments)
    if origin is list:
        return f"array of {_kind(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(_kind(argument) for argument in arguments)}]"
    if origin is dict:
        return f"map of {_kind(arguments[0])} to {_kind(arguments[1])}"
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return " or ".join(f"`{member.value}`" for member in hint)
    if isinstance(hint, type) and issubclass(hint, protocol.Message):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    return {str: "text", bytes: "bytes", int: "integer", float: "number", bool: "boolean", Any: "any"}.get(
        hint, str(hint)
    )


def error_codes() -> str:
    """Every code, whether it is worth another try, and what to do."""
    lines = ["# Errors", "", "Every error has a stable `code`, a message, often a hint, and says whether the same call may succeed later.", "",
             "| code | exception | retry | when, and what to do |", "|---|---|---|---|"]  # fmt: skip
    for _, found in inspect.getmembers(errors, inspect.isclass):
        if issubclass(found, errors.BarrelError) and "code" in found.__dict__ and found is not errors.BarrelError:
            lines.append(
                f"| `{found.code}` | `{found.__name__}` | {'yes' if found.retryable else 'no'} | {inspect.getdoc(found)} |"
            )
    lines += [
        "",
        "## Exit codes of barrelctl",
        "",
        "0 ok, 1 the request failed, 2 wrong usage, 3 no runtime, 4 model not found, 130 interrupted.",
    ]
    return "\n".join(lines) + "\n" + NOTE


def load_options() -> str:
    """The options of load_model."""
    lines = ["# Options of load_model", "",
             "As keyword arguments in Python, as keys of `[models.NAME]` (which also has `autoload`), and as `--set KEY=VALUE` of `barrelctl load`."]  # fmt: skip
    for title, struct in (
        ("Options", options._Given), ("model_opts", options.LlamaModelOpts), ("model_opts of the stub", options.StubModelOpts),
        ("context_opts", options.ContextOpts),
    ):  # fmt: skip
        lines += ["", f"## {title}", "", *_fields(struct)]
    return "\n".join(lines) + "\n" + NOTE


def _fields(struct: Any) -> Iterator[str]:
    comments = _comments(struct)
    yield from ("| field | type | default | meaning |", "|---|---|---|---|")
    hints = typing.get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        default = "required" if field.required else _default(field)
        kind = "text, bytes or array of integers" if field.name == "prompt" else _kind(hints[field.name])
        yield f"| `{field.name}` | {kind} | {default} | {comments.get(field.name, '')} |".replace("||", "|")


def _default(field: Any) -> str:
    if field.default is not msgspec.NODEFAULT:
        return "nil" if field.default is None else f"`{msgspec.to_builtins(field.default)!r}`"
    made = field.default_factory()
    return f"`{msgspec.to_builtins(made)!r}`" if not isinstance(made, msgspec.Struct) else "its defaults"


def _comments(struct: Any) -> dict[str, str]:
    """The comment behind each field of a struct, and of those it inherits from."""
    found: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        with contextlib.suppress(OSError, TypeError):
            source = inspect.getsource(cls)
            found |= {
                m[1]: m[2].replace("|", "/")
                for m in re.finditer(r"^    (\w+): [^#\n]*  # (?!type:|noqa)(.*)$", source, re.MULTILINE)
            }
    return found


def messages() -> str:
    """What clients may ask, with every struct that occurs in it."""
    lines = ["### What clients may ask", "", "| target | verb | kind | body | reply |", "|---|---|---|---|---|"]
    seen: dict[str, Any] = {}
    for target, verbs in protocol.CLIENT_VERBS.items():
        for verb in sorted(verbs):
            body, reply = protocol.CALLS.get(verb, (protocol.CASTS.get(verb), None))
            shown = f"`{target}:ID`" if target == "model" else f"`{target}`"
            answer = f"[{reply.__name__}](#{reply.__name__.lower()})" if reply else "none"
            lines.append(f"| {shown} | `{verb}` | {'call' if reply else 'cast'} | {_kind(body)} | {answer} |")
            for struct in (body, reply):
                _collect(struct, seen)
    lines += ["", "### Events", "", "| verb | body |", "|---|---|"]
    for verb, body in protocol.EVENTS.items():
        lines.append(f"| `{verb}` | {_kind(body)} |")
        _collect(body, seen)
    _collect(protocol.ErrorBody, seen)
    for name in sorted(seen):
        lines += ["", f"### {name}", "", inspect.getdoc(seen[name]) or "", ""]
        if seen[name].__struct_config__.array_like:
            lines += ["As an array of these, in this order.", ""]
        lines += list(_fields(seen[name])) if msgspec.structs.fields(seen[name]) else ["No fields: an empty map."]
    return "\n".join(lines) + "\n"


def python() -> str:
    """The options of requests, and the fields of what comes back."""
    lines = ["## Options of requests", "",
             "Of `complete`, `stream`, `chat` and `stream_chat`; those that continue a session take no `parent_key`, `session_id`, `on_full` and `prefix_checkpoint_len`.", "",
             "| option | type | default | meaning |", "|---|---|---|---|"]  # fmt: skip
    fields = {
        field.name: field
        for struct in (protocol.Complete, protocol.Sampling)
        for field in msgspec.structs.fields(struct)
    }
    comments: dict[str, str] = {}
    for source in (protocol.Complete, protocol.Sampling, request.ContinueOptions, request.CompleteOptions):
        comments |= _comments(source)
    for name, hint in typing.get_type_hints(request.CompleteOptions).items():
        default = _default(fields[name]) if name in fields else "nil"
        lines.append(
            f"| `{name}` | {_python_type(hint)} | {default.replace('nil', '`None`')} | {comments.get(name, '')} |"
        )
    for cls in (results.Completion, results.CacheDelta, results.StreamEvent, results.ModelInfo, results.CacheRow,
                results.CacheStats, results.TierInfo):  # fmt: skip
        lines += [
            "",
            f"## {cls.__name__}",
            "",
            inspect.getdoc(cls) or "",
            "",
            "| field | type | meaning |",
            "|---|---|---|",
        ]
        hints, comments = typing.get_type_hints(cls), _comments(cls)
        lines += [
            f"| `{field.name}` | {_python_type(hints[field.name])} | {comments.get(field.name, '')} |"
            for field in dataclasses.fields(cls)
        ]
        lines += [
            f"| `{name}` | {_python_type(typing.get_type_hints(found.fget)['return'])} | {inspect.getdoc(found)} |"
            for name, found in vars(cls).items()
            if isinstance(found, property)
        ]
    return "\n".join(lines) + "\n"


def _python_type(hint: Any) -> str:
    shown = inspect.formatannotation(hint)
    for module in ("barrel_inference.results.", "collections.abc.", "typing."):
        shown = shown.replace(module, "")
    return f"`{shown}`".replace("|", "\\|")


def file_format() -> str:
    """The docstring of the module that packs images: the tables stand next to the code."""
    lines = inspect.cleandoc(kvc.__doc__ or "").replace(" Pure.", "").splitlines()
    numbers = ", ".join(f"{number} {reason}" for reason, number in kvc.REASON_NUMBERS.items())
    body = "\n".join(lines[1:]).replace("see REASON_NUMBERS", "see below")
    return f"# File format\n\n{lines[0]}\n{body}\n\nSave reasons: {numbers}.\n{NOTE}"


def _collect(hint: Any, seen: dict[str, Any]) -> None:
    if isinstance(hint, type) and issubclass(hint, protocol.Message):
        if hint.__name__ not in seen:
            seen[hint.__name__] = hint
            for inner in typing.get_type_hints(hint, include_extras=True).values():
                _collect(inner, seen)
        return
    for argument in typing.get_args(hint):
        _collect(argument, seen)


def pages() -> dict[Path, str]:
    """Every page as it should be."""
    return {
        REFERENCE / "cli.md": cli(),
        REFERENCE / "configuration.md": configuration(),
        REFERENCE / "errors.md": error_codes(),
        REFERENCE / "file-format.md": file_format(),
        REFERENCE / "load-options.md": load_options(),
        REFERENCE / "protocol.md": _filled("protocol.md", messages()),
        REFERENCE / "python.md": _filled("python.md", python()),
    }


def _filled(name: str, tables: str) -> str:
    by_hand = (REFERENCE / name).read_text()
    return by_hand.split(BEGIN)[0] + BEGIN + "\n" + tables + "\n" + END + by_hand.split(END)[1]


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
