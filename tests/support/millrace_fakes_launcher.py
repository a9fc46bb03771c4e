"""The launcher itself with stand-in children; run as `python FILE FLAG…`.

With `FAKE_TERMINAL` the terminal at stdin becomes its controlling one.
"""

from __future__ import annotations

import fcntl
import os
import sys
import termios
from pathlib import Path

from millrace_launcher.__main__ import main
from millrace_launcher.commands import Programs

CHILDREN = (sys.executable, str(Path(__file__).with_name("millrace_fakes_children.py")))

if __name__ == "__main__":
    if "FAKE_TERMINAL" in os.environ:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    programs = Programs(shard=(*CHILDREN, "shard"), router=(*CHILDREN, "router"))
    sys.exit(main(sys.argv[1:], programs))
