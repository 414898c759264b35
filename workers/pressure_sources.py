"""Where readings of memory come from: the system, the GPUs, a module of the user's, or nowhere.

* `noop`        nothing is ever used.
* `system`      main memory: the fullest of the machine and the control groups with a limit that this process is in.
  The RAM tier and the files of ram_file count there as what they are, shared memory; page cache does not count.
* `nvidia_smi`  the fullest GPU, by NVML, or by the program `nvidia-smi` where NVML cannot be used.
* `module:NAME` an importable module with `sample() -> (used_bytes, total_bytes)`.

A source may block, as drivers do: sample it in a thread.
"""

import importlib
import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from barrel_inference.errors import InvalidArgument
from barrel_inference.tiers import headroom
from barrel_inference.workers.watermarks import Reading

SMI_TIMEOUT_S = 5.0
SMI_COMMAND = ("nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits")

_NAME = re.compile(r"noop|system|nvidia_smi|module:[A-Za-z_][\w.]*")
_MIB = 1 << 20
_STALL = Path("/proc/pressure/memory")


class SourceFailed(Exception):
    """There is no reading; the text says why."""


@dataclass(frozen=True, slots=True)
class Source:
    """A way to read memory."""

    name: str
    sample: Callable[[], Reading]  # raises `SourceFailed`; may block

    @property
    def is_gpu(self) -> bool:
        """Whether it reads memory that evicting from the host's tiers cannot free."""
        return self.name == "nvidia_smi"


def open_source(name: str) -> Source:
    """The source of that name; raises `InvalidArgument` when there is none. Imports the module of a `module:` one."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"source = {name!r} is none", hint="use noop, system, nvidia_smi or module:NAME", option="source"
        )
    if name == "noop":
        return Source(name, lambda: Reading(0, 0))
    if name == "system":
        return Source(name, system_reading)
    if name == "nvidia_smi":
        return Source(name, gpu_reading)
    return Source(name, _of_module(name))


# --- system -------------------------------------------------------------------------------------------------------------


def system_reading() -> Reading:
    """Main memory as the next allocation will find it."""
    return fullest(Reading(bound.used_bytes, bound.total_bytes) for bound in headroom.bounds())


def stall_percent() -> float | None:
    """Share of the last 10 s in which some task waited for memory (Linux PSI); None where the kernel does not say."""
    try:
        text = _STALL.read_text()
    except OSError:
        return None
    found = re.search(r"^some avg10=([\d.]+)", text, re.MULTILINE)
    return float(found[1]) if found else None


# --- GPUs ---------------------------------------------------------------------------------------------------------------


def gpu_reading() -> Reading:
    """The fullest GPU: one that is full stops the model on it, however empty the others are."""
    try:
        readings = nvml_readings()
    except SourceFailed as unusable:
        try:
            readings = smi_readings()
        except SourceFailed as failed:
            raise SourceFailed(f"NVML: {unusable}; {failed}") from None
    return fullest(readings)


def nvml_readings() -> list[Reading]:
    """Each GPU by NVML."""
    import pynvml  # here: loads the driver's library, and only this source needs it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise SourceFailed(str(error)) from None
    try:
        readings = [
            reading
            for number in range(pynvml.nvmlDeviceGetCount())
            if (reading := _nvml_reading(pynvml, number)) is not None
        ]
    except pynvml.NVMLError as error:
        raise SourceFailed(str(error)) from None
    finally:
        pynvml.nvmlShutdown()
    if not readings:
        raise SourceFailed("no GPU tells its memory")
    return readings


def _nvml_reading(nvml: Any, number: int) -> Reading | None:
    """One GPU. One that was split (MIG) tells the memory of the whole, or nothing when we may use a part only."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(number))
    except nvml.NVMLError:
        return None
    return Reading(int(memory.used), int(memory.total)) if memory.total else None


def smi_readings(timeout_s: float = SMI_TIMEOUT_S) -> list[Reading]:
    """Each GPU by `nvidia-smi`, which is killed when its driver hangs."""
    try:
        done = subprocess.run(
            SMI_COMMAND, capture_output=True, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise SourceFailed("there is no program nvidia-smi") from None
    except subprocess.TimeoutExpired:
        raise SourceFailed(f"nvidia-smi did not end within {timeout_s:g} s") from None
    except OSError as error:
        raise SourceFailed(f"nvidia-smi: {error.strerror}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise SourceFailed(f"nvidia-smi ended with {done.returncode}: {said[:200]}")
    readings = parse_smi(done.stdout.decode(errors="replace"))
    if not readings:
        raise SourceFailed("nvidia-smi tells no GPU's memory")
    return readings


def parse_smi(text: str) -> list[Reading]:
    """One reading per line `used, total` in MiB; lines with [N/A] and the like are left out. Pure."""
    found = []
    for line in text.splitlines():
        if numbers := re.fullmatch(r"\s*(\d+)(?: MiB)?\s*,\s*(\d+)(?: MiB)?\s*", line):
            used, total = (int(number) * _MIB for number in numbers.groups())
            if total:
                found.append(Reading(used, total))
    return found


# --- a module -----------------------------------------------------------------------------------------------------------


def _of_module(name: str) -> Callable[[], Reading]:
    module_name = name.removeprefix("module:")
    try:
        sample = getattr(importlib.import_module(module_name), "sample", None)
    except Exception as error:  # a module of somebody else's: whatever its import raises
        raise InvalidArgument(
            f"source = {name!r} cannot be imported: {type(error).__name__}: {error}", option="source"
        ) from error
    if not callable(sample):
        raise InvalidArgument(
            f"source = {name!r} has no function sample()", hint="it returns (used_bytes, total_bytes)", option="source"
        )
    return lambda: _checked(name, sample)


def _checked(name: str, sample: Callable[[], Any]) -> Reading:
    try:
        value = sample()
    except Exception as error:  # as above
        raise SourceFailed(f"{name}: {type(error).__name__}: {error}") from error
    try:
        used, total = value
        is_good = all(isinstance(number, (int, float)) and number >= 0 for number in (used, total))
        reading = Reading(int(used), int(total))
    except (TypeError, ValueError, OverflowError):
        is_good = False
    if not is_good:
        raise SourceFailed(f"{name}: sample() returned {value!r:.100} and not (used_bytes, total_bytes)")
    return reading


def fullest(readings: Iterable[Reading]) -> Reading:
    """The reading with the highest ratio."""
    return max(readings, key=lambda reading: reading.ratio)
