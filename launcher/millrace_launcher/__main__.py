"""`millrace-launcher`: check the settings, then run the deployment until it ends.

Exit codes: 0 after a signal; 1 if a part cannot start or the router dies repeatedly; 2 for a wrong command line; 3 if
the shards die repeatedly (`ShardCrashLoop`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from millrace_launcher import logs
from millrace_launcher.errors import LaunchError
from millrace_launcher.settings.arguments import PROGRAM, read_settings
from millrace_launcher.settings.commands import Commands, Programs
from millrace_launcher.settings.prepare import prepare
from millrace_launcher.supervision.launcher import Launcher


def main(
    argv: Sequence[str] | None = None,
    programs: Programs | None = None,
    *,
    program: str = PROGRAM,
) -> int:
    """Run and return the exit code; with 1 and 3, the last line says why. The help calls it `program`."""
    settings = read_settings(sys.argv[1:] if argv is None else argv, program=program)
    logs.setup(settings.launcher)
    try:
        with ExitStack() as claims:
            commands = prepare(settings, programs or Programs(), claims)
            asyncio.run(_launch(commands))
    except LaunchError as error:
        logs.tell_end(error, json_output=settings.launcher.json_output)
        return error.exit_code
    return 0


async def _launch(commands: Commands) -> None:
    await Launcher(commands).run()


if __name__ == "__main__":
    sys.exit(main())
