"""A checkpoint is never resident twice: what was read of its files is given back."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.choose import choose_kernels
from millrace_shard.kernels.cpu.int8_linear import with_int8
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.weights.safetensor_files import SafetensorFiles, release_pages
from millrace_testing.models.models import prompt_of, read_driver, read_model, save_tiny

CPU = torch.device("cpu")

TENSORS, MEGABYTES = 16, 25
READ_ALL = """
import sys
from pathlib import Path
from typing import Any
import torch
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.weights.weights import Weights

def peak():
    # Not getrusage's, which a child takes over from its parent.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

def whole(name):
    return float(weights.replicated(name, 5000, 2500).sum())

def stored(name):
    total = sum(float(part.sum()) for part in weights.rows(name, 5000, 2500 * world_size).parts)
    weights.release()
    return total

kind, folder, world_size, *names = sys.argv[1:]
world_size = int(world_size)
group = ProcessGroup(0, world_size, torch.device("cpu"))
weights = Weights(Path(folder), dtype=torch.bfloat16, device=torch.device("cpu"), group=group)
before, total = peak(), 0.0
for name in names:
    total += {"whole": whole, "stored": stored}[kind](name)
print(peak() - before, total)
"""


@pytest.mark.parametrize(("kind", "world_size"), [("whole", 1), ("stored", 1), ("stored", 2)])
def test_reading_tensors_one_by_one_holds_one_of_them(
    kind: str, world_size: int, tmp_path: Path
) -> None:
    names = [f"t{i}" for i in range(TENSORS)]
    shape = (5000, 2500 * world_size)
    tensors = {name: torch.full(shape, 1.0, dtype=torch.bfloat16) for name in names}
    assert all(t.nbytes == world_size * MEGABYTES * 10**6 for t in tensors.values())
    save_file(tensors, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", READ_ALL, kind, str(tmp_path), str(world_size), *names]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    grown, total = done.stdout.split()
    assert float(total) == sum(float(t[:, :2500].sum()) for t in tensors.values())
    # One tensor as read, one as copied and what summing takes; far from all sixteen.
    assert int(grown) < TENSORS // 2 * MEGABYTES


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("plain", torch.bfloat16),
        ("plain", torch.float32),
        ("cpu", torch.bfloat16),
        ("cpu", torch.float32),
        ("int8", torch.bfloat16),
    ],
)
def test_a_model_keeps_nothing_of_its_files(
    kind: str, dtype: torch.dtype, stored: torch.dtype, model_type: str, tmp_path: Path
) -> None:
    """A read past the end of a truncated mapped file kills the process."""
    heads: dict[str, Any] = (
        {} if model_type == "gpt2" else {"num_key_value_heads": 1, "head_dim": 32}
    )
    save_tiny(tmp_path / "saved", model_type, num_attention_heads=2, **heads)
    # As a hub's cache has it: links to files of other names.
    file = tmp_path / "a blob"
    folder = tmp_path / "saved"
    tensors = load_file(folder / "model.safetensors")
    save_file({n: v.to(stored) for n, v in tensors.items()}, file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(file)
    kernels = kernels_of(kind, dtype)
    driver = read_driver(folder, kernels, dtype=dtype)
    gc.collect()
    assert str(file) not in Path("/proc/self/maps").read_text()
    os.truncate(file, 0)
    (run,) = driver.generate([prompt_of(5)], 3)
    assert torch.stack(run.logits).isfinite().all()


def test_loading_gives_back_the_pages_of_each_half_of_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "qwen2")
    resident: dict[int, str] = {}
    names = []
    read_slice = SafetensorFiles.read

    def read(files: SafetensorFiles, name: str, *, dim: int, span: tuple[int, int]) -> Tensor:
        assert {half_of(other) for other in resident.values()} <= {half_of(name)}
        found = read_slice(files, name, dim=dim, span=span)
        resident[found.data_ptr()] = name
        names.append(name)
        return found

    def release(found: Tensor) -> None:
        del resident[found.data_ptr()]

    monkeypatch.setattr(SafetensorFiles, "read", read)
    monkeypatch.setattr("millrace_shard.weights.safetensor_files.release_pages", release)
    read_model(tmp_path)
    assert sorted(names) == sorted(load_file(tmp_path / "model.safetensors"))
    assert resident == {}


def half_of(name: str) -> str:
    """`model.layers.0.mlp` of `model.layers.0.mlp.up_proj.weight`."""
    return name.rsplit(".", 2)[0]


def kernels_of(kind: str, dtype: torch.dtype) -> Kernels:
    if kind == "plain":
        return PlainKernels(deterministic=True)
    made = choose_kernels(CPU, dtype, deterministic=True, shapes=[LayerShape.small(32)])
    if made.name != "cpu":
        pytest.skip("no operators")
    return with_int8(made) if kind == "int8" else made


def test_released_pages_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    torch.arange(100_000).numpy().tofile(path)
    mapped = torch.from_file(str(path), size=100_000, dtype=torch.int64)
    release_pages(mapped)
    assert torch.equal(mapped, torch.arange(100_000))
    release_pages(mapped[:3])
    release_pages(mapped[:0])
    assert torch.equal(mapped, torch.arange(100_000))
