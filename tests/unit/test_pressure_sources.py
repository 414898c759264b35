"""Readings of memory: what each source makes of what it finds."""

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from barrel_inference.errors import InvalidArgument
from barrel_inference.tiers import headroom
from barrel_inference.tiers.headroom import Bound
from barrel_inference.workers import pressure_sources as sources
from barrel_inference.workers.pressure_sources import Gpu, SourceFailed, open_source
from barrel_inference.workers.watermarks import Reading

MIB = 1 << 20


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only program on PATH: write what it does after `#!/bin/sh`."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "nvidia-smi"


def says(program: Path, script: str) -> None:
    """Give the program its script."""
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> str:
    """The name of a source whose module is this text."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return f"module:{name}"


def test_noop_is_never_under_pressure() -> None:
    """Nothing is used."""
    assert open_source("noop").sample().ratio == 0.0


def test_system_reads_main_memory() -> None:
    """Some of the machine's memory, or of a smaller limit, is used."""
    reading = open_source("system").sample()
    assert 0 < reading.used_bytes <= reading.total_bytes <= psutil.virtual_memory().total


def test_the_fullest_bound_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A control group near its limit is under pressure, however much the machine has left."""
    bounds = [Bound(headroom.MACHINE, 10, 1000), Bound(f"{tmp_path}/b", 95, 100), Bound(str(tmp_path), 100, 500)]
    monkeypatch.setattr(headroom, "bounds", lambda *_roots: bounds)
    assert sources.system_reading(tmp_path) == Reading(95, 100)


def test_the_worst_stall_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel's account of the machine and of each group above us is read; only that all tasks waited counts."""
    bounds = [Bound(headroom.MACHINE, 10, 1000), Bound(str(tmp_path), 10, 500)]
    monkeypatch.setattr(headroom, "bounds", lambda *_roots: bounds)
    (tmp_path / "pressure").mkdir()
    line = "avg10={} avg60=0.00 avg300=0.00 total=1"
    for file, full in (("pressure/memory", "2.50"), ("memory.pressure", "37.00")):
        (tmp_path / file).write_text(f"some {line.format('99.00')}\nfull {line.format(full)}\n")
    assert sources.system_reading(tmp_path).stall_share == 0.37


@pytest.mark.parametrize("name", ["", "magic", "module:", "module:a b", "nvidia"])
def test_an_unknown_source_is_named(name: str) -> None:
    """A refusal has the value and what there is."""
    with pytest.raises(InvalidArgument, match=r"source = .* is none — use noop"):
        open_source(name)


# --- nvidia-smi ---------------------------------------------------------------------------------------------------------


def test_the_fullest_gpu_counts(smi: Path) -> None:
    """One reading per GPU; the worst is taken, not the sum."""
    says(smi, 'echo "1000, 80000"; echo "70000, 80000"')
    gpus = sources.smi_gpus()
    assert gpus == [Gpu(Reading(1000 * MIB, 80000 * MIB)), Gpu(Reading(70000 * MIB, 80000 * MIB))]
    worst = sources.worst_of(gpus)
    assert (worst.ratio, worst.is_gpu) == (0.875, True)


def test_gpus_that_do_not_tell_are_left_out(smi: Path) -> None:
    """MIG and [N/A] lines are passed over while another GPU tells."""
    says(smi, 'echo "[N/A], [N/A]"; echo "[Insufficient Permissions], 80000"; echo; echo " 10 MiB, 40 MiB"')
    assert sources.worst_of(sources.smi_gpus()).ratio == 0.25


@pytest.mark.parametrize("said", ["[N/A], [N/A]", "[Not Supported], [Not Supported]", "N/A, N/A"])
def test_gpus_without_memory_of_their_own_are_the_systems(smi: Path, said: str) -> None:
    """Where GPU and host share the memory it is the host's that counts, and evicting from host tiers frees it."""
    says(smi, f'echo "{said}"')
    reading = sources.worst_of(sources.smi_gpus())
    assert not reading.is_gpu
    assert 0 < reading.used_bytes <= reading.total_bytes


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ('echo "[Insufficient Permissions], [Insufficient Permissions]"', "Insufficient Permissions"),
        ('echo "[N/A], 81559"', "81559"), ("exit 0", "there is none"), ('echo "No devices were found"', "No devices"),
        ('echo "driver/library version mismatch" >&2; exit 18', "ended with 18: driver/library"),
    ],
)  # fmt: skip
def test_no_reading_has_a_reason(smi: Path, script: str, reason: str) -> None:
    """What the program says goes into the error; a divided GPU that may not be asked is not taken for an empty one."""
    says(smi, script)
    with pytest.raises(SourceFailed, match=reason):
        sources.worst_of(sources.smi_gpus())


def test_a_hanging_driver_is_given_up(smi: Path) -> None:
    """A program that does not end is killed."""
    says(smi, "exec /bin/sleep 600")
    with pytest.raises(SourceFailed, match=r"did not end within 0\.2 s"):
        sources.smi_gpus(timeout_s=0.2)


def test_an_absent_or_broken_program_is_a_reason(smi: Path) -> None:
    """No program, or one that cannot be run."""
    with pytest.raises(SourceFailed, match="there is no program"):
        sources.smi_gpus()
    smi.write_text("not a program")
    with pytest.raises(SourceFailed, match="nvidia-smi: "):
        sources.smi_gpus()


def test_the_program_stands_in_for_nvml(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVML the program is asked; without either, both reasons are told."""

    def unusable() -> list[Gpu]:
        raise SourceFailed("Driver Not Loaded")

    monkeypatch.setattr(sources, "nvml_gpus", unusable)
    with pytest.raises(SourceFailed, match="NVML: Driver Not Loaded; there is no program"):
        open_source("nvidia_smi").sample()
    says(smi, 'echo "42, 100"')
    assert open_source("nvidia_smi").sample().ratio == 0.42


# --- NVML ---------------------------------------------------------------------------------------------------------------


class Nvml:
    """The driver's library on a machine with a GPU in two parts, one that keeps to itself, and one that shares memory."""

    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        """Whatever the driver says."""

    class NVMLError_NotFound(NVMLError):
        """No such part."""

    class NVMLError_NotSupported(NVMLError):
        """Not on this GPU."""

    def nvmlInit(self) -> None:
        """Always there."""

    def nvmlShutdown(self) -> None:
        """Let go."""

    def nvmlDeviceGetCount(self) -> int:
        """Three."""
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        """A name."""
        return ("divided", "shy", "shared")[index]

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        """The first is divided."""
        if handle == "shared":
            raise self.NVMLError_NotSupported
        return [int(handle == "divided"), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, _handle: str) -> int:
        """More numbers than parts."""
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, _handle: str, number: int) -> str:
        """Parts 0 and 3."""
        if number not in (0, 3):
            raise self.NVMLError_NotFound
        return f"part {number}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        """The parts tell."""
        if handle == "shared":
            raise self.NVMLError_NotSupported
        if handle == "shy":
            raise self.NVMLError("Insufficient Permissions")
        return SimpleNamespace(used=9 if handle == "part 3" else 1, total=10)


def test_parts_of_a_divided_gpu_fill_up_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fullest part counts; GPUs that do not tell are passed over."""
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    assert sources.nvml_gpus() == [
        Gpu(Reading(1, 10)), Gpu(Reading(9, 10)), Gpu(reason="Insufficient Permissions"), Gpu(),
    ]  # fmt: skip
    assert open_source("nvidia_smi").sample() == Reading(9, 10, is_gpu=True)


# --- modules ------------------------------------------------------------------------------------------------------------


def test_a_module_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `sample()` gives the reading."""
    name = module(tmp_path, monkeypatch, "source_good", "def sample():\n    return 42, 100\n")
    assert open_source(name).sample() == Reading(42, 100)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("import absent_module_of_mine", "cannot be imported: ModuleNotFoundError"), ("x = 1", "no function sample"), ("sample = 3", "no function")],
)  # fmt: skip
def test_a_module_that_is_no_source_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    """It is refused when it is chosen, with the reason."""
    with pytest.raises(InvalidArgument, match=reason):
        open_source(module(tmp_path, monkeypatch, "source_bad", text))


@pytest.mark.parametrize(
    ("value", "reason"),
    [("1", "returned 1"), ("(1, 2, 3)", "returned"), ("('a', 1)", "returned"), ("(-1, 5)", "returned"), ("1 / 0", "ZeroDivisionError"),
     ("(float('nan'), 1)", "returned"), ("None", "returned None")],
)  # fmt: skip
def test_what_is_no_reading_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, reason: str) -> None:
    """Whatever a module returns or raises, there is a reason and no crash."""
    source = open_source(module(tmp_path, monkeypatch, "source_odd", f"def sample():\n    return {value}\n"))
    with pytest.raises(SourceFailed, match=reason):
        source.sample()
