"""The child process: runs one stage and writes its figures. It ends with UNUSABLE where no stage can work."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
import traceback
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from bench.gpu.children import UNUSABLE
from bench.gpu.engine.scale import SCALES
from bench.gpu.figures import Figure, append
from bench.gpu.setting import Setting, UnusableError
from millrace_testing.triton_interpreter import spare_unused_work


def main() -> int:
    """Exit status: 1 with a traceback when the stage failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module", help="import path of a module with `run`")
    parser.add_argument("--device", required=True)
    parser.add_argument("--shape", choices=SCALES, required=True)
    parser.add_argument("--figures", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--until",
        type=float,
        required=True,
        help="on the monotonic clock, which counts imports, too",
    )
    parser.add_argument("--shard-flag", action="append", default=[])
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args()
    # SIGTERM becomes an exit, so that a stage ends its children and removes its files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ends = {"": time.time()}

    def emit(figure: Figure) -> None:
        # A figure that is emitted again covers the same runs and more.
        began = max(end for name, end in ends.items() if name != figure.name)
        ends[figure.name] = time.time()
        append(args.figures, replace(figure, began=began, ended=ends[figure.name]))
        print(figure.text(), flush=True)

    setting = Setting(
        device=torch.device(args.device),
        scale=SCALES[args.shape],
        out=args.out,
        deadline=args.until,
        shard_flags=tuple(args.shard_flag),
        checkpoint=args.checkpoint,
    )
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
        # As in the tests: half of the interpreter's time.
        spare_unused_work()
    try:
        # A stage whose packages are missing fails alone.
        importlib.import_module(args.module).run(setting, emit)
    except UnusableError as error:
        print(error, flush=True)
        return UNUSABLE
    except Exception:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # The shutdown of torch takes seconds, and threads of libraries may never end.
    os._exit(status)
