from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import sysconfig
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels import choose
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.build import BuildError, load_operators, operators_loaded
from millrace_shard.kernels.choose import choose_kernels
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.quantized import CodeFormat

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton for this platform")


def chosen(dtype: torch.dtype = torch.float32, head_dim: int = 64) -> str:
    return choose_kernels(CPU, dtype, deterministic=True, shapes=[LayerShape.small(head_dim)]).name


@pytest.fixture(autouse=True)
def named_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that Triton uses, unless a test sets another one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "named"))
    return tmp_path / "named"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder below Millrace's cache, where the user names none."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "millrace"))
    return tmp_path / "millrace" / "triton"


def pretend(monkeypatch: pytest.MonkeyPatch, difference: float | Exception) -> None:
    """Operators that load, and then differ from plain by so much, or fail."""

    def measured(*_: object, **__: object) -> float:
        if isinstance(difference, Exception):
            raise difference
        return difference

    monkeypatch.setattr(choose, "load_operators", lambda: None)
    monkeypatch.setattr(choose, "largest_difference", measured)
    monkeypatch.setattr(choose, "served_difference", measured)
    monkeypatch.setattr(choose, "prompt_difference", measured)
    monkeypatch.setattr(choose, "differing_bits", lambda *_, **__: None)


def test_kernels_that_agree_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0.0)
    assert chosen() == "cpu"
    assert chosen(torch.bfloat16, 80) == "cpu"


@pytest.mark.parametrize("deterministic", [True, False])
def test_determinism_is_handed_on(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    pretend(monkeypatch, 0.0)
    for custom in (True, False):
        kernels = choose_kernels(
            CPU,
            torch.float32,
            deterministic=deterministic,
            shapes=[LayerShape.small(64)],
            custom=custom,
        )
        assert isinstance(kernels, (CpuKernels, PlainKernels))
        assert kernels.deterministic is deterministic


@pytest.mark.parametrize(
    ("difference", "reason"),
    [(0.5, "differ by 0.5"), (float("inf"), "differ by inf"), (RuntimeError("no AMX"), "no AMX")],
)
def test_kernels_that_do_not_agree_are_not_chosen(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    difference: float | RuntimeError,
    reason: str,
) -> None:
    pretend(monkeypatch, difference)
    try:
        load_operators()
    except BuildError as error:
        pytest.skip(str(error))
    assert chosen() == "plain"
    assert [reason in record.message for record in caplog.records] == [True]
    # Nor do the greedy choice and masks take them, or int8.
    assert not operators_loaded()
    load_operators()
    assert operators_loaded()


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=needs_triton)])
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=["host", "device"],
)
def test_running_out_of_memory_does_not_condemn_the_kernels(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, error: RuntimeError
) -> None:
    pretend(monkeypatch, error)
    with pytest.raises(RuntimeError) as raised:
        choose_kernels(device, torch.bfloat16, deterministic=True, shapes=[LayerShape.small(64)])
    assert raised.value is error


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float16, 64), (torch.bfloat16, 20)])
def test_unsupported_dtypes_and_shapes_run_on_plain_kernels(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, head_dim: int
) -> None:
    pretend(monkeypatch, 0.0)
    assert chosen(dtype, head_dim) == "plain"


@pytest.mark.parametrize("head_dim", [24, 64, 80])
def test_heads_of_any_multiple_of_8_run_on_compiled_kernels(head_dim: int) -> None:
    try:
        load_operators()
    except BuildError as error:
        pytest.skip(str(error))
    assert chosen(torch.bfloat16, head_dim) == "cpu"


def test_float16_on_cpu_is_logged_with_the_flag_that_helps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, 0.0)
    assert chosen(torch.float16) == "plain"
    assert ["--dtype bfloat16" in record.message for record in caplog.records] == [True]


def test_other_devices_and_the_flag_choose_plain_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, 0.0)
    other = torch.device("mps")
    kernels = choose_kernels(
        other, torch.float32, deterministic=False, shapes=[LayerShape.small(64)]
    )
    assert kernels.name == "plain"
    for device in (CPU, CUDA):
        kernels = choose_kernels(
            device, torch.float32, deterministic=True, shapes=[LayerShape.small(64)], custom=False
        )
        assert kernels.name == "plain"
    assert not caplog.records


@needs_triton
@pytest.mark.parametrize("deterministic", [True, False])
def test_cuda_kernels_that_agree_are_chosen(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    pretend(monkeypatch, 0.0)
    kernels = choose_kernels(
        CUDA, torch.float16, deterministic=deterministic, shapes=[LayerShape.small(80)]
    )
    assert kernels.name == "cuda"
    assert vars(kernels)["deterministic"] is deterministic


def operators_on_cuda(
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    *,
    deterministic: bool = False,
    disabled: tuple[str, ...] = (),
) -> tuple[str, ...]:
    return choose_kernels(
        CUDA,
        dtype,
        deterministic=deterministic,
        shapes=[LayerShape.small(80, cache_dtype)],
        disabled=disabled,
    ).operators


@needs_triton
def test_torchs_operators_are_taken_in_fast_mode_where_the_model_has_a_use_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, 0.0)
    assert operators_on_cuda() == ("varlen_attn", "grouped_mm")
    assert operators_on_cuda(disabled=("varlen_attn",)) == ("grouped_mm",)
    assert operators_on_cuda(torch.float16) == ("varlen_attn",)
    assert operators_on_cuda(cache_dtype=torch.int8) == ("grouped_mm",)
    assert operators_on_cuda(torch.float32) == operators_on_cuda(deterministic=True) == ()
    coded = replace(LayerShape.small(64), formats=(CodeFormat(values=(0, 1), group_size=None),))
    kernels = choose_kernels(CUDA, torch.float32, deterministic=False, shapes=[coded])
    assert kernels.operators == ("cublas",)


@needs_triton
@pytest.mark.parametrize(
    ("capability", "group_size", "is_taken"),
    [((8, 6), None, False), ((8, 9), None, True), ((9, 0), 128, True), ((12, 0), 128, False)],
)
def test_products_in_e4m3_are_taken_where_the_gpu_has_them(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    group_size: int | None,
    is_taken: bool,
) -> None:
    pretend(monkeypatch, 0.0)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    scaled_products = importlib.import_module("millrace_shard.kernels.cuda.scaled_products")
    monkeypatch.setattr(scaled_products, "converts_e4m3", scaled_products.converts_e4m3.__wrapped__)
    values = (0.0,) * 256
    form = CodeFormat(values=values, group_size=group_size, e4m3_inputs=True)
    shapes = [replace(LayerShape.small(64, has_experts=False), formats=(form,))]

    def taken(dtype: torch.dtype = torch.bfloat16, **flags: Any) -> tuple[str, ...]:
        flags = {"deterministic": False} | flags
        return choose_kernels(CUDA, dtype, shapes=shapes, **flags).operators

    assert ("scaled_mm" in taken()) is is_taken
    assert "scaled_mm" not in taken(torch.float16)
    assert "scaled_mm" not in taken(disabled=("scaled_mm",))
    assert taken(deterministic=True) == ()
    exact = [replace(shapes[0], formats=(replace(form, e4m3_inputs=False),))]
    shapes = exact
    assert "scaled_mm" not in taken()


@needs_triton
@pytest.mark.parametrize(
    "failure", [None, RuntimeError("no kernel image"), TypeError("no such parameter")]
)
def test_an_operator_that_disagrees_or_fails_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: Exception | None
) -> None:
    pretend(monkeypatch, 0.0)

    def measured(kernels: Kernels, *_: object, **__: object) -> float:
        if "varlen_attn" not in kernels.operators:
            return 0.0
        if failure is None:
            return 0.5
        raise failure

    monkeypatch.setattr(choose, "prompt_difference", measured)
    assert operators_on_cuda() == ("grouped_mm",)
    (record,) = caplog.records
    assert record.message.startswith("varlen_attn is not used: ")
    assert str(failure or "differs by 0.5") in record.message


def chosen_on_cuda() -> str:
    return choose_kernels(
        CUDA, torch.bfloat16, deterministic=False, shapes=[LayerShape.small(80)]
    ).name


def refused_on_cuda(dtype: torch.dtype = torch.bfloat16, head_dim: int = 80) -> str:
    """The reason for the lack of kernels; plain torch does not step in, since it was not requested."""
    with pytest.raises(UnsupportedModel, match=r"--disable-custom-kernels runs.*plain") as raised:
        choose_kernels(CUDA, dtype, deterministic=False, shapes=[LayerShape.small(head_dim)])
    return str(raised.value)


@needs_triton
@pytest.mark.parametrize(
    ("difference", "reason"), [(0.5, "differ by 0.5"), (RuntimeError("no cc"), "no cc")]
)
def test_cuda_kernels_that_do_not_agree_are_refused(
    monkeypatch: pytest.MonkeyPatch, difference: float | RuntimeError, reason: str
) -> None:
    pretend(monkeypatch, difference)
    assert reason in refused_on_cuda()


@needs_triton
def test_what_triton_cannot_compile_without_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failure = subprocess.CalledProcessError(1, ["gcc", "main.c"])
    pretend(monkeypatch, failure)
    monkeypatch.setattr("ctypes.CDLL", lambda _: None)
    assert "fail on this GPU: Command" in refused_on_cuda()
    paths = dict(sysconfig.get_paths(), include=str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr("sysconfig.get_paths", lambda _: paths)
        assert f"{tmp_path} has no Python.h: install python3-dev" in refused_on_cuda()
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path))
        patched.delenv("CC", raising=False)
        assert "needs a C compiler: install gcc" in refused_on_cuda()
        patched.setenv("CC", "gcc-99")
        assert "CC names gcc-99, which is not there" in refused_on_cuda()

    def missing(_: str) -> None:
        raise OSError

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert "needs libcuda.so.1 of NVIDIA's driver" in refused_on_cuda()


@needs_triton
def test_errors_of_tritons_compiler_with_adapters_are_reasons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, 0.0)
    errors = importlib.import_module("triton.runtime.errors")

    def fail(*_: object, **__: object) -> float:
        raise errors.OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(choose, "adapter_difference", fail)
    with pytest.raises(UnsupportedModel, match="fail with adapters: out of resource"):
        choose_kernels(
            CUDA, torch.bfloat16, deterministic=False, shapes=[LayerShape.small(64)], adapters=True
        )


@needs_triton
def test_cuda_kernels_must_keep_the_promise_of_deterministic_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, 0.0)
    monkeypatch.setattr(choose, "differing_bits", lambda *_, **__: "the norm")
    assert chosen_on_cuda() == "cuda"
    with pytest.raises(UnsupportedModel, match="depend on the rest of the step: the norm"):
        choose_kernels(CUDA, torch.bfloat16, deterministic=True, shapes=[LayerShape.small(64)])


@needs_triton
def test_every_shape_is_checked_once_as_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0.0)
    checked = []

    def measured(*_: object, shape: LayerShape, **__: object) -> float:
        checked.append(shape)
        return 0.0

    monkeypatch.setattr(choose, "served_difference", measured)
    model = LayerShape(num_heads=28, num_kv_heads=4, head_dim=128, kinds=((4096, None),))
    draft = LayerShape(num_heads=14, num_kv_heads=2, head_dim=64)
    choose_kernels(CUDA, torch.bfloat16, deterministic=False, shapes=[model, draft, model])
    assert checked == [model, draft]


@needs_triton
def test_sums_in_16_bits_are_off_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0.0)
    matmul = torch.backends.cuda.matmul
    flags = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    was = [getattr(matmul, flag) for flag in flags]
    try:
        for flag in flags:
            setattr(matmul, flag, True)
        assert chosen_on_cuda() == "cuda"
        assert [getattr(matmul, flag) for flag in flags] == [False, False]
    finally:
        for flag, value in zip(flags, was, strict=True):
            setattr(matmul, flag, value)


@needs_triton
def test_dtypes_and_shapes_unsupported_on_cuda_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0.0)
    assert "float64" in refused_on_cuda(torch.float64)
    assert "head_dim" in refused_on_cuda(head_dim=512)


def test_without_triton_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0.0)
    monkeypatch.delattr("millrace_shard.kernels.cuda.operators", raising=False)
    monkeypatch.setitem(sys.modules, "millrace_shard.kernels.cuda.operators", None)
    assert "need Triton" in refused_on_cuda()


@needs_triton
def test_triton_compiles_into_the_cache_of_millrace(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    pretend(monkeypatch, 0.0)
    choose_kernels(CUDA, torch.bfloat16, deterministic=True, shapes=[LayerShape.small(64)])
    assert os.environ["TRITON_CACHE_DIR"] == str(own_cache)
    assert not list(own_cache.iterdir())


@needs_triton
def test_a_folder_for_triton_that_the_user_names_is_kept(
    monkeypatch: pytest.MonkeyPatch, named_cache: Path
) -> None:
    pretend(monkeypatch, 0.0)
    choose_kernels(CUDA, torch.bfloat16, deterministic=True, shapes=[LayerShape.small(64)])
    assert os.environ["TRITON_CACHE_DIR"] == str(named_cache)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("variable", ["MILLRACE_CACHE", "TRITON_CACHE_DIR"])
def test_a_cache_that_cannot_be_written_is_named(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, 0.0)
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv(variable, str(blocker / "cache"))
    reason = refused_on_cuda()
    assert "Triton cannot keep compiled kernels" in reason
    assert str(blocker) in reason
    assert f"{variable} names another folder" in reason


def test_a_cache_that_other_users_can_write_is_not_used(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    pretend(monkeypatch, 0.0)
    own_cache.mkdir(parents=True)
    own_cache.chmod(0o777)
    assert "can be written by other users" in refused_on_cuda()


def test_without_a_compiler_plain_is_chosen_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path))
    # Past the cache: the operators may be loaded already.
    monkeypatch.setattr(choose, "load_operators", load_operators.__wrapped__)
    with caplog.at_level(logging.INFO):
        assert chosen() == "plain"
    assert len(caplog.records) == 1
    with pytest.raises(BuildError):
        load_operators.__wrapped__()


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float16, 64), (torch.bfloat16, 20)], ids=["fp16", "odd"]
)
def test_caches_that_it_has_no_operators_for_are_refused(dtype: torch.dtype, dim: int) -> None:
    with pytest.raises(ValueError, match="no CPU cache"):
        CpuKernels(deterministic=True).new_cache(
            num_blocks=2, num_kv_heads=1, head_dim=dim, dtype=dtype, device=CPU
        )
