"""The engine that the options name, loaded."""

from collections.abc import Callable
from pathlib import Path

from barrel_inference.workers.model import engine_stub
from barrel_inference.workers.model.engine import Engine
from barrel_inference.workers.model.options import LoadOptions


def load_engine(options: LoadOptions, state_dir: Path, on_progress: Callable[[float], None]) -> Engine:
    """Load a model; blocks, for minutes if it is large.

    Args:
        on_progress: called with fractions from 0 to 1, on this thread.

    Raises:
        BadModel: it cannot be loaded; the text has llama.cpp's own reason.
    """
    if options.backend == "stub":
        return engine_stub.load(options, on_progress=on_progress)
    # Imported here: a stub model's process needs neither llama.cpp nor numpy.
    from barrel_inference.workers.model import engine_llama

    return engine_llama.load(options, state_dir=state_dir, on_progress=on_progress)
