"""The poison shard, until the file that MILLRACE_DOOM names exists: from then on it dies before it does anything.

It does not warm up as long as the file that MILLRACE_COLD names exists.
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
    """As the poison shard's; what it takes to load that is imported only by one that lives."""
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
