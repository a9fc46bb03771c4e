"""The real launcher with fake children; run as `python FILE FLAG…`.

With `FAKE_TERMINAL` the terminal at stdin becomes its controlling one. `FAKE_DELAY` is the pause, in seconds, before
the second restart without progress. With `FAKE_SPARE`, also in seconds, a second router waits. Times are such that a
slow machine changes nothing: no child counts as steady, and each has time for its last output.
"""

from __future__ import annotations

import fcntl
import math
import os
import sys
import termios
from pathlib import Path

from millrace_launcher.__main__ import main
from millrace_launcher.processes import process
from millrace_launcher.settings.commands import Programs
from millrace_launcher.supervision import launcher, restarts, shards, webserver

CHILDREN = (sys.executable, str(Path(__file__).with_name("children.py")))

if __name__ == "__main__":
    if "FAKE_TERMINAL" in os.environ:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    restarts.FIRST_DELAY_SECONDS = float(os.environ.get("FAKE_DELAY", "0"))
    launcher.LOST_GRACE_SECONDS = process.DRAIN_SECONDS = 60.0
    launcher.LAST_WORDS_SECONDS = 0.1
    shards.STEADY_SECONDS = webserver.STEADY_SECONDS = math.inf
    webserver.SPARE_SECONDS = float(os.environ.get("FAKE_SPARE", "inf"))
    programs = Programs(shard=(*CHILDREN, "shard"), router=(*CHILDREN, "router"))
    sys.exit(main(sys.argv[1:], programs))
