"""barreld's command line, and what it comes to: settings and child specifications."""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from barrel_inference import config
from barrel_inference.config import Settings
from barrel_inference.errors import InvalidArgument
from barrel_inference.protocol import ChildSpec
from barrel_inference.supervisor import spec


def with_sources(arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments with the user's own file and keys in place of a launcher's copy of what they came to."""
    if not arguments.from_launcher:
        return arguments
    return argparse.Namespace(config=arguments.source, set=arguments.source_set)


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments; a wrong one ends the process with a usage message."""
    parser = argparse.ArgumentParser("barreld", description="The root supervisor of Barrel Inference.")
    add = parser.add_argument
    add("--config", type=Path, help="a TOML file that is laid over the packaged sys.toml")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="one key over the file, e.g. log.level=debug")
    add("--from-launcher", action="store_true", help="--config is a copy; a reload reads --source and --source-set")
    add("--source", type=Path, help="the user's own file")
    add("--source-set", action="append", default=[], metavar="KEY=VALUE", help="the user's own --set")
    add("--detach", action="store_true", help="go on in the background")
    add("--tied", action="store_true", help="stop when standard input ends: for a runtime that belongs to a program")
    add("--ready-fd", type=int, help="descriptor for one JSON line: ready, or why not")
    add("--alive-fd", type=int, help="descriptor that every process keeps: its other end shows when all are gone")
    add("--remove-at-exit", action="append", default=[], type=Path, help="directory that goes with this runtime")
    add("--tree", type=Path, help="for embedding and tests: a JSON list of child specifications instead of ours")
    return parser.parse_args(argv)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The checked and resolved configuration as it is on disk now."""
    tables: dict[str, Any] = {}
    if arguments.config:
        try:
            text = arguments.config.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"configuration {str(arguments.config)!r} cannot be read: {error}") from None
        tables = config.parse(text, name=str(arguments.config))
    return config.resolve(config.settings_from(config.lay_over(config.apply_sets(tables, arguments.set))))


def specs_of(arguments: argparse.Namespace, settings: Settings) -> list[ChildSpec]:
    """The children to start: those of the settings, or the given ones."""
    if not arguments.tree:
        return spec.tree_of(settings)
    try:
        found = msgspec.json.decode(arguments.tree.read_bytes(), type=list[ChildSpec])
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidArgument(f"--tree {str(arguments.tree)!r}: {error}") from None
    problems = [problem for child in found for problem in spec.problems(child)]
    problems += [f"id {child_id!r} is given twice" for child_id in spec.duplicate_ids(found)]
    if problems:
        raise InvalidArgument(f"--tree {str(arguments.tree)!r}: {'; '.join(problems)}")
    return found
