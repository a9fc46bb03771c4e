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

from millrace_launcher.errors import ArgumentValidation
from millrace_launcher.verify.options import Options, read_options
from millrace_launcher.verify.replay import replay
from millrace_launcher.verify.requests.prompts import PromptsError
from millrace_launcher.verify.servers.deployment import LAUNCHER, Deployer
from millrace_launcher.verify.servers.inside import NoServer, verify_model
from millrace_launcher.verify.servers.outside import verify_server


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
                else verify_model(options, _deployer(options, launcher, stack))
            )
    except (NoServer, PromptsError, ArgumentValidation) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(report.as_json() if options.as_json else report.as_table())
    return report.exit_code


def _deployer(options: Options, launcher: Sequence[str], stack: ExitStack) -> Deployer:
    """Logs are kept in --log-dir, or until `stack` ends."""
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
    # End the servers as well, as an interrupt does.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
