"""`millrace-verify`: run the cases and print the report.

Exit codes: 0 if every promise held; 1 if one was broken, or a case could not be exercised; 2 for a wrong command line,
or if no server could be started. With --replay, the exit code of `millrace-router replay`.
"""

from __future__ import annotations

import asyncio
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
from millrace_launcher import logs
from millrace_launcher.errors import ArgumentValidation, LaunchError, ShardCannotStart
from millrace_launcher.processes.children import Children, first
from millrace_launcher.settings.arguments import read_settings
from millrace_launcher.settings.commands import Commands, Programs
from millrace_launcher.settings.prepare import prepare
from millrace_launcher.supervision.download import resolve_model
from millrace_launcher.supervision.shard_group import ShardGroup

UNUSABLE = 2
STOP_SECONDS = 10.0


def replay(options: Options, journal: Path, programs: Programs | None = None) -> int:
    """Replay a journal, a file or a folder, on shards with the user's flags.

    The exit code is the router's: 0 for the recorded answers, 1 for others, 2 if journal or shards cannot be used.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="millrace-verify-"))
        settings = read_settings(
            [
                "--log-level=warning",
                *(() if options.target is None else (f"--model-id={options.target}",)),
                *(() if options.revision is None else (f"--revision={options.revision}",)),
                *options.flags,
                f"--shard-uds-path={folder}/shard",
            ]
        )
        logs.setup(settings.launcher, sys.stderr)
        chosen = [
            *(() if options.epoch is None else (f"--epoch={options.epoch}",)),
            *(("--json",) if options.as_json else ()),
        ]
        try:
            commands = prepare(settings, programs or Programs(), stack)
            return asyncio.run(_replay(commands, [str(journal), *chosen]))
        except LaunchError as error:
            sys.stderr.write(f"error: {error}\n")
            return UNUSABLE


async def _replay(commands: Commands, arguments: Sequence[str]) -> int:
    """Start every rank, run the router's replay, and end the ranks. Raises LaunchError."""
    children = Children()
    folder = await resolve_model(commands, children)
    group = ShardGroup(commands, children)
    await children.guard(commands.guard())
    try:
        await group.start(folder)
        if await first(group.ready(), group.death()) == 1:
            raise ShardCannotStart(group.explain_death(was_ready=False))
        addresses = ",".join(f"unix:{path}" for path in commands.socket_paths())
        router = await asyncio.create_subprocess_exec(
            *commands.programs.router, "replay", f"--shard-addresses={addresses}", *arguments
        )
        return await router.wait()
    finally:
        await group.terminate(STOP_SECONDS)
        await children.dismiss_guard()


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
