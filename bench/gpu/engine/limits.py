"""The limits of the device: bytes a second of its memory, bfloat16 operations a second."""

from __future__ import annotations

import torch

from bench.gpu.engine.clock import median_ms

REPEATS = 40


def read_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes a second of a sum over one large buffer."""
    values = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    return num_bytes / median_ms(values.sum, device, repeats=REPEATS) * 1e3


def copy_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes read and written a second, of one half of a large buffer to the other."""
    source = torch.ones(num_bytes // 8, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    moved = 2 * 4 * source.numel()
    return moved / median_ms(lambda: target.copy_(source), device, repeats=REPEATS) * 1e3


def matrix_rate(device: torch.device, size: int) -> float:
    """Operations a second of a product of random square matrices."""
    left, right = torch.randn(2, size, size, dtype=torch.float32, device=device).to(torch.bfloat16)
    out = torch.empty_like(left)
    milliseconds = median_ms(lambda: torch.mm(left, right, out=out), device, repeats=REPEATS)
    return 2 * size**3 / milliseconds * 1e3
