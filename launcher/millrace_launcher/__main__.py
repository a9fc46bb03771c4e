"""`millrace-launcher`: check the settings, then run the deployment until it ends."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from millrace_launcher import logs
from millrace_launcher.arguments import Settings, read_settings
from millrace_launcher.checks import check, notices
from millrace_launcher.commands import Commands, Programs
from millrace_launcher.demo import DEMO_NAME, demo_folder
from millrace_launcher.devices import query_gpus, shard_count, visible_devices
from millrace_launcher.errors import LaunchError
from millrace_launcher.launcher import Launcher
from millrace_launcher.logs import log
from millrace_launcher.runtime import millrace_version, runtime_info
from millrace_launcher.threads import find_intel_openmp, plan_threads, usable_cores


def main(argv: Sequence[str] | None = None, programs: Programs | None = None) -> int:
    """Exit code: 0 after a signal, 1 with `Error: …` on stderr, 2 for a wrong command line."""
    settings = read_settings(sys.argv[1:] if argv is None else argv)
    logs.setup(settings.launcher)
    try:
        commands = _prepare(settings, programs or Programs())
        asyncio.run(_launch(commands))
    except LaunchError as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1
    return 0


async def _launch(commands: Commands) -> None:
    await Launcher(commands).run()


def _prepare(settings: Settings, programs: Programs) -> Commands:
    """Say what will be run, refuse what cannot be, and decide shards and threads. Raises LaunchError."""
    log.info("Millrace %s", millrace_version())
    if settings.show_env:
        log.info("%s", runtime_info(os.environ))
    rows = settings.configured()
    chosen = [f"{name}={value} ({origin})" for name, value, origin in rows if origin != "default"]
    log.info("Set: %s", ", ".join(chosen) or "nothing")
    log.info("Defaults: %s", ", ".join(f"{n}={v}" for n, v, origin in rows if origin == "default"))
    check(settings)
    for notice in notices(settings):
        log.info("%s", notice)
    launcher = settings.launcher
    num_shard = shard_count(
        sharded=launcher.sharded, num_shard=launcher.num_shard, visible=visible_devices(os.environ)
    )
    gpus = query_gpus("name")
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
    return Commands(
        settings=settings,
        model_id=launcher.model_id or str(demo_folder()),
        model_name=launcher.model_id or DEMO_NAME,
        num_shard=num_shard,
        threads=threads,
        environ=os.environ,
        programs=programs,
        compute_type=f"{num_shard}-{gpus[0].lower().replace(' ', '-')}" if gpus else None,
    )


if __name__ == "__main__":
    sys.exit(main())
