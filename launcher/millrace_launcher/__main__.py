"""`millrace-launcher`: check the settings, then run the deployment until it ends. With `shards`: some ranks alone.

Exit codes: 0 after a signal; 1 if a part cannot start or the router dies repeatedly; 2 for a wrong command line; 3 if
the shards die repeatedly (`ShardCrashLoop`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from millrace_launcher import logs
from millrace_launcher.errors import LaunchError
from millrace_launcher.settings.arguments import PROGRAM, Settings, read_settings
from millrace_launcher.settings.commands import Programs
from millrace_launcher.settings.prepare import prepare
from millrace_launcher.settings.rank_arguments import COMMAND, prepare_ranks, read_rank_settings
from millrace_launcher.supervision.launcher import Launcher
from millrace_launcher.supervision.rank_host import RankHost
from millrace_proto.streams import take_any_text


def main(
    argv: Sequence[str] | None = None,
    programs: Programs | None = None,
    *,
    program: str = PROGRAM,
) -> int:
    """Run and return the exit code; with 1 and 3, the last line says why. The help calls it `program`."""
    argv = sys.argv[1:] if argv is None else argv
    take_any_text()
    programs = programs or Programs()
    if argv and argv[0] == COMMAND:
        settings, rank = read_rank_settings(argv[1:])
        return _run(settings, lambda _: RankHost(prepare_ranks(settings, rank, programs)))
    settings = read_settings(argv, program=program)
    return _run(settings, lambda claims: Launcher(prepare(settings, programs, claims)))


def _run(settings: Settings, new: Callable[[ExitStack], Launcher | RankHost]) -> int:
    logs.setup(settings.launcher)

    async def run(claims: ExitStack) -> None:
        await new(claims).run()

    try:
        with ExitStack() as claims:
            asyncio.run(run(claims))
    except LaunchError as error:
        logs.tell_end(error, json_output=settings.launcher.json_output)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
