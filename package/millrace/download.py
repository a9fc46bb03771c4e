"""Brings the files of a model to this machine, with the launcher's own code."""

from __future__ import annotations

import asyncio
import os
import sys

from millrace_launcher import logs
from millrace_launcher.host.threads import plan_threads
from millrace_launcher.processes.children import Children
from millrace_launcher.settings.arguments import Settings
from millrace_launcher.settings.commands import Commands, ModelFolders
from millrace_launcher.supervision.download import resolve_model


def download(settings: Settings, model: str) -> ModelFolders:
    """The model's folders, with progress on stderr, which is a bar on a terminal. Raises LaunchError."""
    logs.setup(settings.launcher, sys.stderr)
    commands = Commands(
        settings=settings,
        model_id=model,
        model_name=model,
        num_shard=1,
        shard_uds_path=settings.launcher.shard_uds_path,
        master_port=settings.shard.master_port,
        threads=plan_threads(cores=1, shards=1, requested=1, intel_openmp=None, environ=os.environ),
        environ=os.environ,
    )
    return asyncio.run(resolve_model(commands, Children()))
