"""complete, chat."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from barrel_inference.cli import completion, context, output
from barrel_inference.errors import BarrelError, InvalidArgument

if TYPE_CHECKING:
    from barrel_inference.client import Stream
    from barrel_inference.request import CompleteOptions
    from barrel_inference.results import Completion

ModelId = Annotated[
    str, typer.Argument(metavar="ID", help="Id of a loaded model.", autocompletion=completion.model_ids)
]
Tokens = Annotated[int | None, typer.Option(help="Tokens to generate at most; default: the room that is left.", min=0)]
Seed = Annotated[int | None, typer.Option(help="Seed of the draws; default: a random one.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]


def complete(
    model_id: ModelId,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; `-`, or none at all: standard input.")] = None,
    tokens: Tokens = None,
    session: Annotated[str | None, typer.Option(help="Keep the context in the model under this name.")] = None,
    grammar: Annotated[Path | None, typer.Option(help="File with a GBNF grammar for the reply.")] = None,
    seed: Seed = None,
    temperature: Temperature = 0.0,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print as it is generated.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document with the whole result.")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Say on standard error what was reused and how long it took.")
    ] = False,
) -> None:
    """Complete a prompt.

    Example: barrelctl complete tiny "The quick brown fox" --tokens 20 --stats
    """
    options: CompleteOptions = {"temperature": temperature, "seed": seed, "response_tokens": tokens}
    if session is not None:
        options["session_id"] = session
    if grammar is not None:
        options["grammar"] = _text_of(grammar)
    text = _prompt(prompt)
    with context.connected() as client, client.stream(model_id, text, **options) as events:
        result = _print_reply(events, as_it_comes=stream and not as_json, whole=not as_json)
    if as_json:
        output.document(result)
    if stats:
        output.note(_stats(result))


def _prompt(given: str | None) -> str | bytes:
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        raise InvalidArgument("PROMPT is missing", hint="give it as an argument, or pipe it in")
    return sys.stdin.buffer.read()


def _text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as bad:
        raise InvalidArgument(f"--grammar {str(path)!r} cannot be read: {bad}") from None


def _print_reply(events: "Stream", *, as_it_comes: bool, whole: bool) -> "Completion":
    """Print the reply's bytes, untouched, and a line feed; return the result."""
    write = sys.stdout.buffer
    result: Completion | None = None
    for event in events:
        if event.kind == "token" and as_it_comes:
            write.write(event.data)
            write.flush()
        result = event.result or result
    assert result is not None, "a stream that ends without an error ends with a result"
    if whole:
        write.write(b"\n" if as_it_comes else result.reply_bytes + b"\n")
        write.flush()
    return result


def _stats(result: "Completion") -> str:
    """One line about a finished request. Pure."""
    speed = result.completion_tokens / result.generation_ms * 1000 if result.generation_ms else 0.0
    source = f" from {result.hit_source}" if result.hit_source else ""
    why = f" ({result.miss_reason})" if result.miss_reason else ""
    return (
        f"{result.cache_hit_kind}{source}{why}: {result.cache_delta.read} of {result.prompt_tokens} prompt tokens reused, "
        f"first token after {result.ttft_ms:.0f} ms, {result.completion_tokens} tokens at {speed:.1f}/s, "
        f"{result.finish_reason}" + (f", survived {result.resubmitted} process deaths" if result.resubmitted else "")
    )


def chat(
    model_id: ModelId,
    system: Annotated[str | None, typer.Option(help="System message at the beginning.")] = None,
    tokens: Tokens = None,
    seed: Seed = None,
    temperature: Temperature = 0.0,
    stats: Annotated[bool, typer.Option("--stats", help="A line of figures after each reply.")] = False,
) -> None:
    """Chat with a model, a message a line. Ctrl-C ends a reply, Ctrl-D the chat.

    Example: barrelctl chat tiny --system "You are brief."
    """
    options: CompleteOptions = {"temperature": temperature, "seed": seed, "response_tokens": tokens}
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    with context.connected() as client:
        client.model_info(model_id)  # a misspelt id is reported before anything is typed
        while (said := _ask()) is not None:
            if not said.strip():
                continue
            turn = [*messages, {"role": "user", "content": said}]
            try:
                with client.stream_chat(model_id, turn, **options) as events:
                    result = _print_reply(events, as_it_comes=True, whole=True)
            except KeyboardInterrupt:
                output.note("\n(interrupted; this turn is forgotten)")
                continue
            except BarrelError as error:
                if not sys.stdin.isatty():
                    raise
                output.note(f"error: {error}")
                continue
            messages = [*turn, {"role": "assistant", "content": result.reply}]
            if stats:
                output.note(_stats(result))


def _ask() -> str | None:
    """The next message; None at the end of input."""
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\n") or None
    import readline  # noqa: F401 - gives input() its line editing and history

    try:
        return input("> ")
    except EOFError:
        print()
        return None
