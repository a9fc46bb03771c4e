"""A checkpoint is never resident twice: what was read of its files is given back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from millrace_shard.mapped_pages import release_pages

TENSORS, MEGABYTES = 16, 25
READ_ALL = """
import sys
from pathlib import Path
import torch
from millrace_shard.parallel import ProcessGroup
from millrace_shard.weights import Weights

def peak():
    # Not getrusage's, which a child takes over from its parent.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

weights = Weights(Path(sys.argv[1]), dtype=torch.bfloat16, device=torch.device("cpu"), group=ProcessGroup.single())
before, total = peak(), 0.0
for name in sys.argv[2:]:
    total += float(weights.replicated(name, 5000, 2500).sum())
print(peak() - before, total)
"""


def test_reading_tensors_one_by_one_holds_one_of_them(tmp_path: Path) -> None:
    names = [f"t{i}" for i in range(TENSORS)]
    tensors = {name: torch.full((5000, 2500), 1.0, dtype=torch.bfloat16) for name in names}
    assert all(t.nbytes == MEGABYTES * 10**6 for t in tensors.values())
    save_file(tensors, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", READ_ALL, str(tmp_path), *names]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    grown, total = done.stdout.split()
    assert float(total) == sum(float(t.sum()) for t in tensors.values())
    # One tensor as read, one as copied and what summing takes; far from all sixteen.
    assert int(grown) < TENSORS // 2 * MEGABYTES


def test_what_was_released_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    torch.arange(100_000).numpy().tofile(path)
    mapped = torch.from_file(str(path), size=100_000, dtype=torch.int64)
    release_pages(mapped)
    assert torch.equal(mapped, torch.arange(100_000))
    release_pages(mapped[:3])
    release_pages(mapped[:0])
    assert torch.equal(mapped, torch.arange(100_000))
