"""The launcher on a kernel whose number of OOM kills is in the file MILLRACE_TEST_OOM."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from millrace_launcher.__main__ import main
from millrace_launcher.supervision import shards
from millrace_launcher.supervision.trust import Distrust


def oom_kills() -> int:
    return int(Path(os.environ["MILLRACE_TEST_OOM"]).read_text())


if __name__ == "__main__":
    vars(shards)["Distrust"] = partial(Distrust, oom_kills)
    sys.exit(main())
