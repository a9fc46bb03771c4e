"""`millrace-launcher`: check the settings, then run the deployment until it ends.

Exit codes: 0 after a signal; 1 when something cannot be had or started, or the router dies again and again; 2 for a
wrong command line; 3 when the shards die again and again (`ShardCrashLoop`).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from millrace_launcher import logs
from millrace_launcher.demo import DEMO_NAME, demo_folder
from millrace_launcher.errors import LaunchError
from millrace_launcher.logs import log
from millrace_launcher.settings.arguments import Settings, read_settings
from millrace_launcher.settings.checks import check, notices
from millrace_launcher.settings.claims import claimed_port, claimed_sockets
from millrace_launcher.settings.commands import Commands, Programs
from millrace_launcher.settings.devices import query_gpus, shard_count, visible_devices
from millrace_launcher.settings.runtime import millrace_version, runtime_info
from millrace_launcher.settings.threads import find_intel_openmp, plan_threads, usable_cores
from millrace_launcher.supervision.launcher import Launcher


def main(argv: Sequence[str] | None = None, programs: Programs | None = None) -> int:
    """The exit code; 1 and 3 come with `Error: …` on stderr."""
    settings = read_settings(sys.argv[1:] if argv is None else argv)
    logs.setup(settings.launcher)
    try:
        with ExitStack() as claims:
            commands = prepare(settings, programs or Programs(), claims)
            asyncio.run(_launch(commands))
    except LaunchError as error:
        sys.stderr.write(f"Error: {error}\n")
        return error.exit_code
    return 0


async def _launch(commands: Commands) -> None:
    await Launcher(commands).run()


def prepare(settings: Settings, programs: Programs, claims: ExitStack) -> Commands:
    """Say what will be run, refuse what cannot be, and decide shards, sockets and threads. Raises LaunchError.

    What is claimed for this deployment is let go of by `claims`.
    """
    _say_settings(settings)
    check(settings)
    launcher, device = settings.launcher, settings.shard.device
    # On CPU it does not matter which devices there are.
    gpus = [] if device == "cpu" else query_gpus("name")
    visible = None if device == "cpu" else visible_devices(os.environ)
    on_cpu = device == "cpu" or (device == "auto" and not gpus)
    for notice in notices(settings, on_cpu=on_cpu):
        log.info("%s", notice)
    num_shard = shard_count(sharded=launcher.sharded, num_shard=launcher.num_shard, visible=visible)
    threads = plan_threads(
        cores=usable_cores(),
        shards=num_shard,
        requested=settings.shard.cpu_threads,
        intel_openmp=find_intel_openmp(),
        environ=os.environ,
    )
    log.info(
        "%d shard(s), GPUs: %s, CPU threads per shard: %d",
        num_shard,
        gpus or "none",
        threads.threads,
    )
    if launcher.model_id is None:
        log.info("No --model-id, so the demo model is served")
    uds_path = claims.enter_context(
        claimed_sockets(
            launcher.shard_uds_path,
            num_shard=num_shard,
            may_move="shard_uds_path" not in settings.chosen,
        )
    )
    master_port = claims.enter_context(
        claimed_port(
            settings.shard.master_port,
            may_move=num_shard > 1 and "master_port" not in settings.chosen,
        )
    )
    return Commands(
        settings=settings,
        model_id=launcher.model_id or str(demo_folder()),
        model_name=launcher.model_id or DEMO_NAME,
        num_shard=num_shard,
        shard_uds_path=uds_path,
        master_port=master_port,
        threads=threads,
        environ=os.environ,
        programs=programs,
        compute_type=f"{num_shard}-{gpus[0].lower().replace(' ', '-')}" if gpus else None,
    )


def _say_settings(settings: Settings) -> None:
    log.info("Millrace %s", millrace_version())
    if settings.show_env:
        log.info("%s", runtime_info(os.environ))
    rows = settings.configured()
    chosen = [f"{name}={value} ({origin})" for name, value, origin in rows if origin != "default"]
    log.info("Set: %s", ", ".join(chosen) or "nothing")
    log.info("Defaults: %s", ", ".join(f"{n}={v}" for n, v, origin in rows if origin == "default"))


if __name__ == "__main__":
    sys.exit(main())
