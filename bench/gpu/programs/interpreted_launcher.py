"""`millrace-launcher` with shards on interpreted kernels."""

from __future__ import annotations

import sys

from millrace_launcher.__main__ import main
from millrace_launcher.settings.commands import Programs

SHARD = (sys.executable, "-m", "bench.gpu.programs.interpreted_shard")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Programs(shard=SHARD)))
