"""`millrace-router`: chooses the command, and imports only what that needs."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
from collections.abc import Sequence
from importlib import import_module

NICENESS = 10
"""On a busy core the thread gets about a tenth of it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router, or one of its other commands; return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["print-schema"]:
        parser = argparse.ArgumentParser(
            "millrace-router print-schema",
            description="Print the description of the API, as /openapi.json has it.",
        )
        parser.parse_args(arguments[1:])
        document = import_module("millrace_router.api.openapi.document")
        sys.stdout.write(document.openapi_json().decode() + "\n")
        return 0
    if arguments[:1] == ["replay"]:
        replay = import_module("millrace_router.journal.replay.command").replay
        return int(replay(arguments[1:]))
    # A start leaves little garbage, and collections take a tenth of its time; the server enables them.
    gc.disable()
    if "--is-successor" in arguments and sys.platform == "linux":
        import_in_background()
    return int(import_module("millrace_router.serving").run(arguments))


def import_in_background() -> None:
    """Import while another router serves, and leave the cores to its steps.

    Only a thread has the low priority, and ends: only root may raise a priority again.
    """

    def load() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        import_module("millrace_router.serving")

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()


if __name__ == "__main__":
    sys.exit(main())
