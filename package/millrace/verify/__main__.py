"""`millrace-verify`: run the cases and print the report.

Exit codes: 0 if every promise held; 1 if one was broken, or a case could not be exercised; 2 for a wrong command line,
or if no server could be started. With --replay, the exit code of `millrace-router replay`.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from millrace.server import LAUNCHER, LocalServers
from millrace.verify.inside import NoServer, verify_model
from millrace.verify.options import Options, read_options
from millrace.verify.outside import verify_server
from millrace.verify.questions import PromptsError
from millrace.verify.replay import replay
from millrace_launcher.errors import ArgumentValidation


def main(argv: Sequence[str] | None = None, launcher: Sequence[str] = LAUNCHER) -> int:
    """Run and return the exit code; `launcher` are Python's arguments that start a server."""
    options = read_options(sys.argv[1:] if argv is None else list(argv))
    try:
        if options.replay is not None:
            return replay(options, options.replay)
        with ExitStack() as stack:
            report = (
                verify_server(options)
                if options.is_url
                else verify_model(options, _servers(options, launcher, stack))
            )
    except (NoServer, PromptsError, ArgumentValidation) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(report.as_json() if options.as_json else report.as_table())
    return report.exit_code


def _servers(options: Options, launcher: Sequence[str], stack: ExitStack) -> LocalServers:
    """Logs are kept in --log-dir, or until `stack` ends."""
    if options.log_dir is None:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millrace-verify-")))
    else:
        logs = options.log_dir
        logs.mkdir(parents=True, exist_ok=True)
    return LocalServers(
        model=options.target,
        logs=logs,
        revision=options.revision,
        flags=options.flags,
        launcher=launcher,
    )


if __name__ == "__main__":
    # End the servers as well, as an interrupt does.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
