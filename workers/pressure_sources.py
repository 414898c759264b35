"""Where readings of memory come from: the system, the GPUs, a module of the user's, or nowhere.

* `noop`        nothing is ever used.
* `system`      main memory: the fullest of the machine and the control groups with a limit that this process is in.
  The RAM tier and the files of ram_file count there as what they are, shared memory; page cache does not count. With it
  comes the kernel's own account of tasks that wait for memory (PSI).
* `nvidia_smi`  the fullest GPU, or part of a divided one, by NVML, or by the program `nvidia-smi` where NVML cannot be used;
  the system's reading where GPUs have no memory of their own.
* `module:NAME` an importable module with `sample() -> (used_bytes, total_bytes)`.

A source may block, as drivers do: sample it in a thread.
"""

import contextlib
import importlib
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from barrel_inference.errors import InvalidArgument
from barrel_inference.tiers import headroom
from barrel_inference.workers.watermarks import Reading

SMI_TIMEOUT_S = 5.0
SMI_COMMAND = ("nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits")

_NAME = re.compile(r"noop|system|nvidia_smi|module:[A-Za-z_][\w.]*")
_MIB = 1 << 20


class SourceFailed(Exception):
    """There is no reading; the text says why."""


@dataclass(frozen=True, slots=True)
class Source:
    """A way to read memory."""

    name: str
    sample: Callable[[], Reading]  # raises `SourceFailed`; may block


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


def system_reading(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Reading:
    """Main memory as the next allocation will find it; the roots are arguments for tests."""
    bounds = headroom.bounds(proc, cgroups)
    fullest_bound = fullest(Reading(bound.used_bytes, bound.total_bytes) for bound in bounds)
    files = [proc / "pressure/memory"]
    files += [Path(bound.name) / "memory.pressure" for bound in bounds if bound.name != headroom.MACHINE]
    return replace(fullest_bound, stall_share=max(map(stall_share, files)))


def stall_share(file: Path) -> float:
    """The part of the last 10 s in which every task waited for memory; 0 where the kernel keeps no account."""
    try:
        found = re.search(r"^full avg10=([\d.]+)", file.read_text(), re.MULTILINE)
    except OSError:
        return 0.0
    return float(found[1]) / 100 if found else 0.0


# --- GPUs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gpu:
    """What one GPU, or one part of a divided one, tells. Neither a reading nor a reason: it has no memory of its own."""

    reading: Reading | None = None
    reason: str = ""


def gpu_reading() -> Reading:
    """The fullest GPU: one that is full stops the model on it, however empty the others are."""
    try:
        gpus = nvml_gpus()
    except SourceFailed as unusable:
        try:
            gpus = smi_gpus()
        except SourceFailed as failed:
            raise SourceFailed(f"NVML: {unusable}; {failed}") from None
    return worst_of(gpus)


def worst_of(gpus: Sequence[Gpu]) -> Reading:
    """The reading that counts; raises `SourceFailed` when none does."""
    readings = [gpu.reading for gpu in gpus if gpu.reading is not None]
    if readings:
        return replace(fullest(readings), is_gpu=True)
    reasons = sorted({gpu.reason for gpu in gpus if gpu.reason})
    if reasons or not gpus:
        raise SourceFailed(f"no GPU tells its memory: {'; '.join(reasons) or 'there is none'}")
    return system_reading()


def nvml_gpus() -> list[Gpu]:
    """Each GPU by NVML."""
    import pynvml  # here: loads the driver's library, and only this source needs it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise SourceFailed(str(error)) from None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        return [_nvml_gpu(pynvml, part) for handle in handles for part in _nvml_parts(pynvml, handle)]
    except pynvml.NVMLError as error:
        raise SourceFailed(str(error)) from None
    finally:
        pynvml.nvmlShutdown()


def _nvml_parts(nvml: Any, handle: Any) -> list[Any]:
    """The parts that a GPU is divided into (MIG), which fill up one by one; else the GPU."""
    parts = []
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return [handle]
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(nvml.NVMLError_NotFound):  # a number that is not in use
                parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
    except nvml.NVMLError:  # it cannot be divided, or we may not ask
        pass
    return parts or [handle]


def _nvml_gpu(nvml: Any, handle: Any) -> Gpu:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_NotSupported:
        return Gpu()
    except nvml.NVMLError as error:
        return Gpu(reason=str(error))
    return Gpu(Reading(int(memory.used), int(memory.total))) if memory.total else Gpu(reason="a total of 0")


def smi_gpus(timeout_s: float = SMI_TIMEOUT_S) -> list[Gpu]:
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
    return parse_smi(done.stdout.decode(errors="replace"))


def parse_smi(text: str) -> list[Gpu]:
    """One GPU per line `used, total` in MiB. Pure.

    One without memory of its own has [N/A] or [Not Supported] twice; a divided one, or one that is not ours to ask about,
    has another word in brackets, or one number only.
    """
    gpus = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if (numbers := re.fullmatch(r"(\d+)(?: MiB)?\s*,\s*(\d+)(?: MiB)?", line)) and int(numbers[2]):
            gpus.append(Gpu(Reading(int(numbers[1]) * _MIB, int(numbers[2]) * _MIB)))
        elif re.fullmatch(r"\[?(N/A|Not Supported)\]?\s*,\s*\[?(N/A|Not Supported)\]?", line):
            gpus.append(Gpu())
        else:
            gpus.append(Gpu(reason=line[:100]))
    return gpus


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
