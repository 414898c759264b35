"""keys init, add, ls, remove: who may come in over TCP."""

import os
import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from barrel_inference.cli import output
from barrel_inference.cli.failure import not_found
from barrel_inference.cli.lifecycle import AsJson, Yes
from barrel_inference.errors import InvalidArgument

app = typer.Typer(no_args_is_help=True, help="CURVE keys: who may come in over TCP.")

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory that `runtime.curve` names.")]
Name = Annotated[str, typer.Argument(help="The client's name, which is also its tenant.")]

# A name is a file's name and a tenant's; `uid:N` is the tenant of a local user, so no colon.
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,99}")


@app.command()
def init(directory: Directory) -> None:
    """Make the runtime's own keys.

    Example: barrelctl keys init ~/.config/barrel-inference/curve
    """
    import zmq.auth  # here, so that other commands do not wait for it

    if (directory / "server.key_secret").exists():
        raise InvalidArgument(f"{str(directory)!r} has a server key already", hint="remove it first to replace it")
    os.umask(0o077)
    (directory / "clients").mkdir(mode=0o700, parents=True, exist_ok=True)
    made = zmq.auth.create_certificates(directory, "server")
    _give_to_owner(directory, directory / "clients", *made)
    output.note(f'the keys are in {directory}; set runtime.curve = "{directory.absolute()}" and runtime.tcp')


@app.command()
def add(
    directory: Directory,
    name: Name,
    out: Annotated[Path | None, typer.Option(help="Where to put what the client needs; default: ./NAME")] = None,
) -> None:
    """Let one more client in, and write the directory that it needs.

    A running runtime takes the new list of clients with `barrelctl reload`.

    Example: barrelctl keys add ~/.config/barrel-inference/curve alice --out alice-keys
    """
    import zmq.auth  # as above

    target = out or Path(name)
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"{name!r} cannot name a client", hint="use letters, digits and any of . _ -")
    if name in _names(directory):
        raise InvalidArgument(f"there is a client {name!r} already", hint=f"barrelctl keys remove {directory} {name}")
    if target.exists():
        raise InvalidArgument(f"{str(target)!r} exists already", hint="name another directory with --out")
    os.umask(0o077)
    target.mkdir(parents=True)
    public, _ = zmq.auth.create_certificates(target, "client")
    shutil.copy(directory / "server.key", target / "server.key")
    listed = directory / "clients" / f"{name}.key"
    shutil.move(public, listed)
    _give_to_owner(directory, listed)
    output.note(f"give {target} to {name}, who sets BARREL_CURVE to it and BARREL_ENDPOINT to the runtime's address")


@app.command("ls")
def list_clients(directory: Directory, as_json: AsJson = False) -> None:
    """The clients that may come in.

    Example: barrelctl keys ls ~/.config/barrel-inference/curve
    """
    if as_json:
        output.document(_names(directory))
        return
    for name in _names(directory):
        print(name)


@app.command()
def remove(
    directory: Directory,
    name: Name,
    yes: Yes = False,
) -> None:
    """Let a client in no more; asks first.

    `barrelctl reload` makes it effective for new connections, `barrelctl restart router` also ends those that stand.

    Example: barrelctl keys remove ~/.config/barrel-inference/curve alice --yes
    """
    if name not in (known := _names(directory)):
        raise not_found("client", name, known, f"there are {', '.join(known) or 'none'}")
    output.confirm(f"Remove the key of {name}? It cannot be made again.", yes=yes)
    (directory / "clients" / f"{name}.key").unlink()
    output.note(f"{name} is removed; `barrelctl restart router` also ends its connections")


def _give_to_owner(directory: Path, *made: str | Path) -> None:
    """The directory belongs to the runtime's user, who has to read what root puts there."""
    if os.getuid() == 0:
        owner = directory.stat()
        for path in made:
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _names(directory: Path) -> list[str]:
    if not (directory / "server.key").exists():
        raise InvalidArgument(f"{str(directory)!r} has no server key", hint=f"barrelctl keys init {directory}")
    return sorted(path.stem for path in (directory / "clients").glob("*.key"))
