"""The poison shard, which exits at its start while the file MILLRACE_DOOM exists.

It does not warm up while the file MILLRACE_COLD exists.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

LAST_WORDS = "the device has fallen off the bus"
POLL_SECONDS = 0.02


def main() -> int:
    """Run the poison shard; imports it only if this process is to live."""
    if "serve" in sys.argv and Path(os.environ["MILLRACE_DOOM"]).exists():
        sys.stderr.write(f"{LAST_WORDS}\n")
        return 9
    from millrace_shard.engine import warmup
    from millrace_testing.shards.poison_shard import poisoned_main

    warm_up, cold = warmup.warm_up, Path(os.environ["MILLRACE_COLD"])

    def late_warm_up(*args: Any, **kwargs: Any) -> warmup.WarmedUp:
        while cold.exists():
            time.sleep(POLL_SECONDS)
        return warm_up(*args, **kwargs)

    warmup.warm_up = late_warm_up
    return poisoned_main()


if __name__ == "__main__":
    sys.exit(main())
