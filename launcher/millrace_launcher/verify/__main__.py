"""`millrace-verify`: run the cases, print what was found.

Exit codes: 0 when everything promised held; 1 when a promise was broken, or a circumstance did not come about; 2 for a
wrong command line, or when no server could be had. With --replay, the exit code of `millrace-router replay`.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from millrace_launcher.errors import ArgumentValidation
from millrace_launcher.verify.options import Options, read_options
from millrace_launcher.verify.replay import replay
from millrace_launcher.verify.requests.prompts import PromptsError
from millrace_launcher.verify.servers.deployment import LAUNCHER, Deployer
from millrace_launcher.verify.servers.inside import NoServer, verify_model
from millrace_launcher.verify.servers.outside import verify_server


def main(argv: Sequence[str] | None = None, launcher: Sequence[str] = LAUNCHER) -> int:
    """The exit code; `launcher` is what Python is told to run for a server."""
    options = read_options(sys.argv[1:] if argv is None else list(argv))
    try:
        if options.replay is not None:
            return replay(options, options.replay)
        with ExitStack() as stack:
            report = (
                verify_server(options)
                if options.is_url
                else verify_model(options, _deployer(options, launcher, stack))
            )
    except (NoServer, PromptsError, ArgumentValidation) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(report.as_json() if options.as_json else report.as_table())
    return report.exit_code


def _deployer(options: Options, launcher: Sequence[str], stack: ExitStack) -> Deployer:
    """Logs are kept where the user wants them, and as long as `stack` otherwise."""
    if options.log_dir is None:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millrace-verify-")))
    else:
        logs = options.log_dir
        logs.mkdir(parents=True, exist_ok=True)
    return Deployer(
        model=options.target,
        logs=logs,
        revision=options.revision,
        api_key=options.api_key,
        flags=options.flags,
        launcher=launcher,
    )


if __name__ == "__main__":
    # Ends the servers as well, as an interrupt does.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
