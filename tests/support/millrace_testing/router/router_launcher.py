"""The launcher with another program for its routers, none of which waits; run as `python FILE ROUTER_PROGRAM FLAG…`."""

from __future__ import annotations

import math
import sys

from millrace_launcher.__main__ import main
from millrace_launcher.settings.commands import Programs
from millrace_launcher.supervision import webserver

if __name__ == "__main__":
    webserver.SPARE_SECONDS = math.inf
    sys.exit(main(sys.argv[2:], Programs(router=(sys.executable, sys.argv[1]))))
