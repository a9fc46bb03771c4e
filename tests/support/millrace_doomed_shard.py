"""The poison shard, until the file that MILLRACE_DOOM names exists: from then on it dies before it does anything."""

from __future__ import annotations

import os
import sys
from pathlib import Path

LAST_WORDS = "the device has fallen off the bus"

if __name__ == "__main__":
    if "serve" in sys.argv and Path(os.environ["MILLRACE_DOOM"]).exists():
        sys.stderr.write(f"{LAST_WORDS}\n")
        sys.exit(9)
    program = str(Path(__file__).with_name("millrace_poison_shard.py"))
    os.execv(sys.executable, [sys.executable, program, *sys.argv[1:]])
