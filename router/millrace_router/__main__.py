"""`millrace-router`: chooses the command, and imports only what that needs."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from importlib import import_module


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
    return int(import_module("millrace_router.serving").run(arguments))


if __name__ == "__main__":
    sys.exit(main())
