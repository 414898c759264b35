"""install-service: a systemd unit for this user or for the machine."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from barrel_inference.cli import output, unit
from barrel_inference.errors import InvalidArgument, NotSupported

_AFTER_SYSTEM = f"""\
it runs; see it with: systemctl status {unit.NAME}
clients use it with:  export BARREL_ENDPOINT=ipc:///run/{unit.NAME}/router
let a user in with:   usermod -aG {unit.NAME} USER"""
_AFTER_USER = f"it runs; see it with: systemctl --user status {unit.NAME}"


def install_service(
    system: Annotated[
        bool, typer.Option("--system/--user", help="For the machine (as root), or for this user.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file that is laid over the packaged sys.toml; default: barrel-inference/sys.toml in /etc or ~/.config."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
    root: Annotated[Path, typer.Option(help="Install below this directory and run no command: for packagers.")] = Path(
        "/"
    ),
) -> None:
    """Install, enable and start a systemd service; again, after an upgrade, it restarts it.

    The system service runs as the user `barrel-inference`; members of the group of that name may send it requests.

    Example: barrelctl install-service --user --dry-run
    """
    if config is not None and not config.is_file():
        raise InvalidArgument(f"--config {str(config)!r} is no file")
    own_config = Path(f"/etc/{unit.NAME}/sys.toml") if system else _user_config_dir() / unit.NAME / "sys.toml"
    paths = unit.Paths(str(Path(sys.executable).parent), str(config.absolute() if config else own_config))
    if any(character in f"{paths.bin_dir}{paths.config}" for character in " \t\n%\"'\\$"):
        raise InvalidArgument(f"{paths.bin_dir!r} or {paths.config!r} has characters that a unit cannot name")
    is_packaging = root != Path("/")
    if system and not dry_run and not is_packaging and os.getuid() != 0:
        raise NotSupported("a system service is installed by root", hint="use sudo, or --user")
    files = _system_files(paths) if system else _user_files(paths)
    if config is None and not (root / own_config.relative_to("/")).exists():
        files[own_config] = unit.EMPTY_CONFIG
    for path, text in files.items():
        _write(root / path.relative_to("/"), text, dry_run=dry_run)
    for command in [] if is_packaging else _commands(system=system):
        _run(command, dry_run=dry_run)
    if not is_packaging and not dry_run:
        output.note(_AFTER_SYSTEM if system else _AFTER_USER)


def _system_files(paths: unit.Paths) -> dict[Path, str]:
    return {
        Path(f"/etc/sysusers.d/{unit.NAME}.conf"): unit.SYSUSERS,
        Path(f"/etc/systemd/system/{unit.NAME}.service"): unit.system_unit(paths),
    }


def _user_files(paths: unit.Paths) -> dict[Path, str]:
    return {_user_config_dir() / "systemd" / "user" / f"{unit.NAME}.service": unit.user_unit(paths)}


def _user_config_dir() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()).absolute()


def _commands(*, system: bool) -> list[list[str]]:
    manager = ["systemctl"] if system else ["systemctl", "--user"]
    return [
        *([["systemd-sysusers", f"{unit.NAME}.conf"]] if system else []),
        [*manager, "daemon-reload"],
        [*manager, "enable", f"{unit.NAME}.service"],
        [*manager, "restart", f"{unit.NAME}.service"],
    ]


def _write(path: Path, text: str, *, dry_run: bool) -> None:
    output.note(f"{'would write' if dry_run else 'writing'} {path}")
    if dry_run:
        print(text, end="")
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise InvalidArgument(f"{str(path)!r} cannot be written: {error.strerror}") from None


def _run(command: list[str], *, dry_run: bool) -> None:
    output.note(f"{'would run' if dry_run else 'running'}: {' '.join(command)}")
    if dry_run:
        return
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        raise NotSupported(f"there is no {command[0]} on this machine", hint="use `barrelctl start`") from None
    except subprocess.CalledProcessError as failed:
        raise NotSupported(f"{' '.join(command)} ended with status {failed.returncode}") from None
