"""A kernel that writes where no memory is: the shard has to see the device as lost."""

from __future__ import annotations

import os
import sys

import torch
import triton
import triton.language as tl

from millrace_shard.device.failures import is_lost, is_out_of_memory

OFFSET = 1 << 40
"""Elements past the tensor, in no allocation of any process."""


@triton.jit
def write_far(place, offset):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
    """Write at `place` + `offset`."""
    tl.store(place + offset, 1.0)


def main() -> int:
    """Return 0 if the device counts as lost afterwards, and the error is not taken for lack of memory."""
    device = torch.device("cuda", 0)
    try:
        target = torch.zeros(16, device=device)
        write_far[(1,)](target, OFFSET)
        torch.cuda.synchronize()
    except RuntimeError as error:
        lost, no_memory = is_lost(device), is_out_of_memory(error)
        print(f"{type(error).__name__}, lost: {lost}, out of memory: {no_memory}", flush=True)
        return 0 if lost and not no_memory else 1
    print("no error came", flush=True)
    return 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # torch frees memory of the lost device while the interpreter shuts down, which may abort the process.
    os._exit(status)
