"""The launcher with another program for its routers; run as `python FILE ROUTER_PROGRAM FLAG…`."""

from __future__ import annotations

import sys

from millrace_launcher.__main__ import main
from millrace_launcher.settings.commands import Programs

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], Programs(router=(sys.executable, sys.argv[1]))))
