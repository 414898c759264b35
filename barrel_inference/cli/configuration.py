"""config show, check."""

from pathlib import Path
from typing import Annotated

import typer

from barrel_inference.cli import output

app = typer.Typer(no_args_is_help=True, help="The configuration, and what is wrong with one.")

File = Annotated[Path | None, typer.Argument(metavar="FILE", help="A TOML file; default: the packaged sys.toml alone.")]


@app.command()
def show(file: File = None) -> None:
    """Print the whole configuration as TOML: FILE laid over the defaults, directories filled in.

    Example: barrelctl config show my.toml
    """
    from barrel_inference import config, runtime  # here, so that other commands do not wait for them

    print(config.to_toml(config.resolve(runtime.read_settings(file))), end="")


@app.command()
def check(file: File = None) -> None:
    """Say everything that is wrong with a configuration.

    Example: barrelctl config check my.toml
    """
    from barrel_inference import runtime  # as above

    runtime.read_settings(file)
    output.note(f"{file or 'the packaged sys.toml'}: no problem found")
