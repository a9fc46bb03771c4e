from __future__ import annotations

import logging
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels import choose
from millrace_shard.kernels.build import BuildError, load_operators, operators_loaded
from millrace_shard.kernels.choose import choose_kernels
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.plain import PlainKernels

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


def pretend(monkeypatch: pytest.MonkeyPatch, difference: float | RuntimeError) -> None:
    """Operators that load, and then differ from plain by so much, or fail."""

    def measured(*_: object, **__: object) -> float:
        if isinstance(difference, RuntimeError):
            raise difference
        return difference

    monkeypatch.setattr(choose, "load_operators", lambda: None)
    monkeypatch.setattr(choose, "largest_difference", measured)
    monkeypatch.setattr(choose, "served_difference", measured)
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
def test_kernels_that_do_not_agree_are_not(
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
def test_what_they_cannot_do_runs_on_plain(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, head_dim: int
) -> None:
    pretend(monkeypatch, 0.0)
    assert chosen(dtype, head_dim) == "plain"


def test_for_float16_on_cpu_it_is_said_what_to_do(
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
def test_what_cuda_kernels_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0.0)
    assert "float64" in refused_on_cuda(torch.float64)
    assert "head_dim" in refused_on_cuda(head_dim=512)
    shape = LayerShape.small(80, torch.int8)
    with pytest.raises(UnsupportedModel, match="they have no KV cache in int8 yet"):
        choose_kernels(CUDA, torch.bfloat16, deterministic=True, shapes=[shape])


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
