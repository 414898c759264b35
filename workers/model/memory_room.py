"""Does a model fit? What it will take (`estimate`) against what the machine and the control groups have left."""

from dataclasses import dataclass

from barrel_inference.errors import BadModel
from barrel_inference.tiers.headroom import free_memory_bytes
from barrel_inference.workers.model import residency
from barrel_inference.workers.model.estimate import Estimate, estimate, estimate_stub
from barrel_inference.workers.model.gguf_header import read_header
from barrel_inference.workers.model.model_path import files_of, resolve
from barrel_inference.workers.model.options import LoadOptions


@dataclass(frozen=True, slots=True)
class Room:
    """An estimate, and what there is."""

    estimate: Estimate
    needed: int  # what is not in memory already
    available: int

    @property
    def fits(self) -> bool:
        """Is there enough?"""
        return self.needed <= self.available

    def refusal(self, model_path: str) -> BadModel:
        """Why it is not loaded."""
        parts = ", ".join(f"{name} {_size(count)}" for name, count in self.estimate.as_dict().items())
        return BadModel(
            f"{model_path!r} needs about {_size(self.needed)} of memory ({parts}), and {_size(self.available)} are left",
            hint="a smaller context_opts.n_ctx or n_batch, or a quantised type_k and type_v, needs less; "
            "force loads it anyway",
            estimate=self.estimate.as_dict(), needed=self.needed, available=self.available,
        )  # fmt: skip


def room_for(options: LoadOptions) -> Room:
    """Look at the files, and at the memory that is left now; reads a few megabytes.

    Raises:
        BadModel: a file is not there, or is no GGUF that makes sense.
    """
    available = free_memory_bytes()
    if options.llama is None:
        found = estimate_stub(options)
        return Room(found, found.total, available)
    files = files_of(resolve(options.model_path))
    try:
        found = estimate([read_header(file) for file in files], options)
        cached = sum(map(residency.cached_bytes, files)) if found.weights_are_mapped else 0
    except (OSError, EOFError, ValueError, OverflowError) as bad:  # numbers in a damaged head may be anything
        raise BadModel(f"{options.model_path!r} cannot be read: {bad}") from bad
    return Room(found, found.needed(cached), available)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.1f} MiB"
