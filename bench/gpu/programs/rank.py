"""One of two ranks that sum tensors without end: `rank.py RANK PORT DEVICE`.

It writes a line after the first sum, and ends with 0 after a CollectiveError.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch

from millrace_shard.device.process_group import CollectiveError, ProcessGroup

TIMEOUT = timedelta(seconds=30)
ELEMENTS = 1 << 16


def main() -> int:
    """Return 0 after the failure of a collective."""
    rank, port, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    group = ProcessGroup(rank, 2, device)
    group.join("127.0.0.1", port, timeout=TIMEOUT)
    part = torch.ones(ELEMENTS, device=device)
    try:
        group.all_reduce(part)
        print("joined", flush=True)
        while True:
            group.all_reduce(part.fill_(1))
            if kind == "cuda":
                torch.cuda.synchronize()
    except CollectiveError as error:
        print(f"CollectiveError: {str(error).partition(chr(10))[0]}", flush=True)
        return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # gloo's threads of a broken group may abort the process while the interpreter shuts down.
    os._exit(status)
