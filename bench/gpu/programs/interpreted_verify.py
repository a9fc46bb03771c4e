"""`millrace-verify` with servers on interpreted kernels."""

from __future__ import annotations

import signal
import sys

from bench.gpu.setting import INTERPRETED_LAUNCHER
from millrace.verify.__main__ import main

if __name__ == "__main__":
    # End the servers as well, as an interrupt does.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(launcher=INTERPRETED_LAUNCHER))
