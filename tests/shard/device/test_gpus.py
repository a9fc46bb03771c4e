"""Why torch cannot use the GPUs of a host: each reason on a fake of torch's build, the driver and the host's files."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from millrace_proto import gpus as host
from millrace_shard.commands import composition
from millrace_shard.commands.device_settings import choose_device, choose_dtype, machine
from millrace_shard.config import ShardConfig
from millrace_shard.device import gpus
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import ModelError, UnsupportedModel
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.models.description import ModelDescription
from millrace_testing.models.models import save_tiny
from millrace_testing.project import ROOT

KERNEL_MODULE = (
    "NVRM version: NVIDIA UNIX {} Kernel Module  {}  Release Build\nGCC version: 12.2.0\n"
)


@dataclass
class Machine:
    """A host without nvidia-smi: its device files and those of its driver."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def __post_init__(self) -> None:
        for name in ("dev", "driver", "wsl"):
            (self.folder / name).mkdir()
        patch = self.monkeypatch.setattr
        patch(host, "DEVICES", self.folder / "dev")
        patch(host, "DRIVER", self.folder / "driver")
        patch(gpus, "WSL_LIBRARIES", self.folder / "wsl")
        patch(host, "WSL_LIBRARIES", self.folder / "wsl")
        self.monkeypatch.setenv("PATH", str(self.folder))
        self.monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def with_driver(self, version: str, arch: str = "x86_64") -> None:
        (self.folder / "driver" / "version").write_text(KERNEL_MODULE.format(arch, version))

    def with_gpu(self) -> Path:
        path = self.folder / "dev" / "nvidia0"
        path.touch()
        return path

    def with_torch(self, version: str, *, cuda: str | None = None, hip: str | None = None) -> None:
        self.monkeypatch.setattr(torch, "__version__", version)
        self.monkeypatch.setattr(torch.version, "cuda", cuda)
        self.monkeypatch.setattr(torch.version, "hip", hip)
        self.monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def with_devices(self, *devices: tuple[str, int, int]) -> None:
        self.with_torch("2.13.0+cu130", cuda="13.0")
        found = [Properties(*device) for device in devices]
        patch = self.monkeypatch.setattr
        patch(torch.cuda, "is_available", lambda: True)
        patch(torch.cuda, "device_count", lambda: len(found))
        patch(
            torch.cuda,
            "get_device_properties",
            lambda i: found[i if isinstance(i, int) else i.index],
        )
        patch(torch.cuda, "mem_get_info", lambda _: (78 << 30, 79 << 30))
        patch(torch.cuda, "get_device_capability", lambda i: (found[int(i.index)].major, 5))


@dataclass
class Properties:
    """What torch says of a GPU."""

    name: str
    major: int
    minor: int


@pytest.fixture
def computer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def problem() -> str:
    made = gpus.report()
    assert made.names == ()
    assert made.problem is not None
    return made.problem


def test_a_build_without_cuda_is_named(computer: Machine) -> None:
    computer.with_torch("2.13.0+cpu")
    assert "torch 2.13.0+cpu is built without CUDA: install" in problem()


@pytest.mark.parametrize(
    ("driver", "arch", "way_on"),
    [("570.86.15", "x86_64", "cu126"), ("470.256", "Open Kernel Module for x86_64", "")],
)
def test_an_old_driver_is_named_with_the_one_that_is_needed(
    driver: str, arch: str, way_on: str, computer: Machine
) -> None:
    computer.with_torch("2.13.0+cu130", cuda="13.0")
    computer.with_driver(driver, arch)
    text = problem()
    assert f"driver is {driver}, and torch 2.13.0+cu130 for CUDA 13.0 needs 580 or later" in text
    assert ("cu126" in text) == (way_on == "cu126")


def test_an_old_driver_is_enough_for_an_older_cuda(computer: Machine) -> None:
    computer.with_torch("2.13.0+cu126", cuda="12.6")
    computer.with_driver("570.86.15")
    assert "needs" not in problem()


def test_a_device_file_without_permission_is_named(
    computer: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    computer.with_torch("2.13.0+cu130", cuda="13.0")
    path = computer.with_gpu()
    monkeypatch.setattr("os.access", lambda *_: False)
    assert problem() == f"this user may not open {path}"


def test_wsl_without_the_driver_of_windows_is_named(computer: Machine) -> None:
    computer.with_torch("2.13.0+cu130", cuda="13.0")
    (computer.folder / "dev" / "dxg").touch()
    assert "WSL takes the driver of Windows" in problem()
    assert host.shown_gpus() == ["a GPU of Windows"]


def test_the_words_of_torch_are_kept_where_nothing_else_explains(
    computer: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    computer.with_torch("2.13.0+cu130", cuda="13.0")
    computer.with_driver("580.65.06")

    def fail() -> None:
        raise RuntimeError("CUDA unknown error - this may be due to an environment\nmore")

    monkeypatch.setattr(torch.cuda, "init", fail)
    assert problem().endswith("reports: CUDA unknown error - this may be due to an environment")


def test_rocm_and_turing_are_refused_by_name_unless_plain(computer: Machine) -> None:
    computer.with_devices(("NVIDIA A100", 8, 0), ("Tesla T4", 7, 5))
    assert "GPU 1, Tesla T4, has compute capability 7.5, and the kernels need 8.0" in problem()
    assert gpus.report(plain=True).names == ("NVIDIA A100", "Tesla T4")
    computer.with_devices(("AMD Instinct MI300X", 9, 4))
    computer.monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "built for AMD's GPUs (ROCm)" in problem()


def test_bfloat16_on_a_gpu_without_it_is_refused(computer: Machine) -> None:
    computer.with_devices(("Tesla T4", 7, 5))
    config = ShardConfig.from_args(["model", "--dtype=bfloat16"])
    with pytest.raises(UnsupportedModel, match=r"7\.5 have no bfloat16: give --dtype float16"):
        choose_dtype(config, torch.device("cuda", 0))


def test_device_auto_says_loudly_that_it_serves_on_the_cpu_of_a_host_with_a_gpu(
    computer: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    computer.with_torch("2.13.0+cpu")
    config = ShardConfig.from_args(["model"])
    assert choose_device(config) == torch.device("cpu")
    assert not caplog.records
    path = computer.with_gpu()
    assert choose_device(config) == torch.device("cpu")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"ON CPU, although this host has {path}: torch 2.13.0+cpu is built" in caplog.text
    computer.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device(config) == torch.device("cpu")
    assert len(caplog.records) == 1


def test_device_cuda_ends_with_the_reason(computer: Machine) -> None:
    computer.with_torch("2.13.0+cu130", cuda="13.0")
    computer.with_driver("535.104.05")
    config = ShardConfig.from_args(["model", "--device=cuda"])
    with pytest.raises(ModelError, match=r"no GPU can be used: NVIDIA's driver is 535\.104\.05"):
        choose_device(config)


@pytest.mark.parametrize(
    ("flags", "graphs"),
    [
        ((), "CUDA graphs for up to 256 rows"),
        (("--cuda-graphs=0",), "no CUDA graphs"),
        (("--cuda-graphs=1,8",), "CUDA graphs for 1, 8 rows"),
    ],
)
def test_one_line_names_the_machine(flags: tuple[str, ...], graphs: str, computer: Machine) -> None:
    computer.with_devices(("NVIDIA A100", 8, 0), ("NVIDIA H100 80GB HBM3", 9, 0))
    computer.with_driver("580.65.06")
    config = ShardConfig.from_args(["model", "--rank=1", "--world-size=2", *flags])
    device = choose_device(config)
    assert device == torch.device("cuda", 1)
    line = machine(config, device, PlainKernels(deterministic=False))
    triton = line.partition("Triton ")[2].partition(";")[0]
    assert line == (
        "serving on GPU 1, NVIDIA H100 80GB HBM3 (compute capability 9.0, 79.0 GiB, 78.0 free), driver 580.65.06;"
        f" torch 2.13.0+cu130, Triton {triton}; kernels plain, fast; {graphs}"
    )
    assert machine(config, torch.device("cpu"), PlainKernels(deterministic=True)).startswith(
        "serving on CPU, "
    )


@pytest.mark.parametrize("has_gpu", [False, True])
def test_kernels_run_in_the_interpreter_where_windows_shares_no_gpu_with_torch(
    computer: Machine, has_gpu: bool
) -> None:
    spec = spec_from_file_location("conftest", ROOT / "tests" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    conftest = module_from_spec(spec)
    spec.loader.exec_module(conftest)
    computer.monkeypatch.setattr(conftest, "DEVICES", computer.folder / "dev")
    assert not conftest.has_gpu()
    (computer.folder / "dev" / "dxg").touch()
    computer.monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert conftest.has_gpu() == has_gpu


@pytest.mark.parametrize(
    ("flags", "gib", "text"),
    [
        (
            (),
            22,
            "about 26.1 GiB in bfloat16 on this rank, and NVIDIA L4 has 22.0 GiB, of which 1.0 GiB are free now: these"
            " would fit: --quantize fp8 (about 13.7 GiB), --quantize int4 (about 7.8 GiB), --num-shard 2 (about 13.0",
        ),
        (
            (),
            12,
            "would fit: --quantize int4 (about 7.8 GiB), --num-shard 4 (about 6.5 GiB on each GPU)",
        ),
        (("--world-size=2", "--quantize=int4"), 6, "GiB on this rank"),
        ((), 0.25, "free now, and no flag makes it fit on such GPUs"),
    ],
)
def test_out_of_memory_while_loading_says_what_would_fit(
    flags: tuple[str, ...], gib: float, text: str, computer: Machine
) -> None:
    save_tiny(computer.folder / "model", "llama")
    computer.with_devices(("NVIDIA L4", 8, 9))
    patch = computer.monkeypatch.setattr
    patch(torch.cuda, "mem_get_info", lambda _: (1 << 30, int(gib * 2**30)))
    patch(torch.cuda, "get_device_name", lambda _: "NVIDIA L4")
    patch(ModelDescription, "num_parameters", lambda _: 14_000_000_000)

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    patch(composition, "load_model", fail)
    config = ShardConfig.from_args([str(computer.folder / "model"), *flags])
    kernels, group = PlainKernels(deterministic=False), ProcessGroup.single()
    parts = torch.device("cuda", 0), torch.bfloat16, kernels, group, None
    with pytest.raises(ModelError, match="not enough memory to load the model") as raised:
        composition._model(config, *parts)
    assert text in str(raised.value)
    with pytest.raises(torch.OutOfMemoryError):
        composition._model(config, torch.device("cpu"), *parts[1:])


def test_the_guide_names_the_oldest_driver_and_the_build_for_older_ones() -> None:
    page = (ROOT / "docs/operate.md").read_text()
    newest, older = gpus.LEAST_DRIVERS[13], gpus.LEAST_DRIVERS[gpus.OLDER_CUDA]
    assert f"version {newest} or later" in page
    assert f"drivers from {older} on, PyTorch's index `{gpus.OLDER_BUILD}`" in page
    capability = ".".join(map(str, gpus.LEAST_CAPABILITY))
    assert f"compute capability {capability} (Ampere) or later" in page
