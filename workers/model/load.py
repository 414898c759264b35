"""The engine that the options name, loaded."""

from collections.abc import Callable
from pathlib import Path

from barrel_inference.errors import BadModel
from barrel_inference.workers.model import engine_stub
from barrel_inference.workers.model.engine import Engine
from barrel_inference.workers.model.memory_room import Room, room_for
from barrel_inference.workers.model.options import LoadOptions


def load_engine(
    options: LoadOptions, *, state_dir: Path, grammar_bytes: int, force: bool, on_progress: Callable[[float], None],
    log_line: Callable[[str], None],
) -> Engine:  # fmt: skip
    """Load a model; blocks, for minutes if it is large.

    Args:
        grammar_bytes: the longest grammar that a request may bring.
        force: try although the estimate says that it does not fit.
        on_progress: called with fractions from 0 to 1, on threads of the load.
        log_line: takes llama.cpp's log lines.

    Raises:
        BadModel: it cannot be loaded, or does not fit; the text has llama.cpp's own reason.
    """
    if options.backend == "stub":
        _check_room(options, force=force, on_gpu=False)
        return engine_stub.load(options, on_progress=on_progress)
    # Imported here: a stub model's process needs neither llama.cpp nor numpy.
    from barrel_inference.workers.model import llama_open

    _check_room(options, force=force, on_gpu=llama_open.uses_gpu(options))
    return llama_open.load(
        options, state_dir=state_dir, on_progress=on_progress, log_line=log_line, grammar_bytes=grammar_bytes
    )


def _check_room(options: LoadOptions, *, force: bool, on_gpu: bool) -> None:
    """Refuse what cannot fit. A GPU's memory is llama.cpp's to check: it fails there with an error, and kills nobody."""
    if force or on_gpu:
        return
    room = _room_if_readable(options)
    if room is not None and not room.fits:
        raise room.refusal(options.model_path)


def _room_if_readable(options: LoadOptions) -> Room | None:
    try:
        return room_for(options)
    except BadModel:
        return None  # the load itself says why, with llama.cpp's own reason
