"""One step of a prompt and decodes, and one replay, over a tiny model: the work of a sanitizer."""

from __future__ import annotations

import argparse
import sys

import torch

from bench.gpu.engine.scale import SCALES
from bench.gpu.engine.session import opened

ROWS = 2
LENGTH = 20


def main() -> int:
    """Return 0; a failed row raises."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    device, scale = torch.device(args.device), SCALES["tiny"]
    # Under a sanitizer, the start's check of agreement would take more than the stage has; `agreement` runs it.
    with opened(scale.small, scale, device, args.flags, is_checked=False) as model:
        # A graph of four rows is captured, which the decode of three replays.
        session = model.session(max_rows=ROWS + 2)
        session.admit(ROWS, LENGTH, room=4)
        session.admit_beside(1, LENGTH, room=4)
        session.play(ROWS + 1, 1)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
