"""The formats of codes that checkpoints have."""

from __future__ import annotations

import torch

from millrace_shard.kernels.quantized import CodeFormat

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_NF4 = torch.tensor(
    (
        *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
    )
)
_FP4 = torch.tensor([0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4])
_BYTES = torch.arange(256, dtype=torch.uint8)

TABLES = {
    "int4": torch.arange(16.0) - 8,
    "int4 with zeros": torch.arange(16.0),
    "nf4": _NF4,
    "fp4": torch.cat((_FP4, -_FP4)),
    "e2m1": torch.cat((_E2M1, -_E2M1)),
    "int8": _BYTES.view(torch.int8).float(),
    "e4m3": _BYTES.view(torch.float8_e4m3fn).float(),
}
"""What the codes of each format stand for."""


def code_format(name: str, group_size: int | None) -> CodeFormat:
    """The format of that name in TABLES."""
    values = tuple(TABLES[name].tolist())
    return CodeFormat(values=values, group_size=group_size, has_offsets=name == "int4 with zeros")
