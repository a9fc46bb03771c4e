"""`millrace-shard` on CPU with the kernels for CUDA in Triton's interpreter; TRITON_INTERPRET has to be set."""

from __future__ import annotations

import sys

from bench.gpu.engine.kernels import cuda_kernels
from millrace_shard import __main__ as program
from millrace_shard.commands import serve
from millrace_shard.kernels.base import Kernels


def interpreted(*_: object, deterministic: bool, **__: object) -> Kernels:
    """Stands for `choose_kernels`."""
    return cuda_kernels(deterministic=deterministic)


if __name__ == "__main__":
    vars(serve)["choose_kernels"] = interpreted
    sys.exit(program.main())
