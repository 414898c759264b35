"""Errors as barrelctl reports them: one line, and an exit code. Pure."""

import difflib

from barrel_inference.errors import BarrelError, InvalidArgument, NoRuntime, NotFound

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_RUNTIME = 3
EXIT_NOT_FOUND = 4
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def exit_code(error: BarrelError) -> int:
    """The exit code of an error."""
    match error:
        case NoRuntime():
            return EXIT_NO_RUNTIME
        case NotFound():
            return EXIT_NOT_FOUND
        case InvalidArgument():
            return EXIT_USAGE
        case _:
            return EXIT_FAILED


def one_line(error: BarrelError) -> str:
    """What, with which value, and what to do. A wrong configuration has a line for each problem."""
    text = str(error)
    return text if error.details.get("problems") else " ".join(text.split())


def suggest(wanted: str, known: list[str]) -> str | None:
    """`did you mean ...?` for a misspelt name; None when nothing is close."""
    close = difflib.get_close_matches(wanted, known, 1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else None


def not_found(what: str, wanted: str, known: list[str], otherwise: str) -> NotFound:
    """The error for a name that is not among the known ones."""
    return NotFound(f"no {what} {wanted!r}", hint=suggest(wanted, known) or otherwise)
