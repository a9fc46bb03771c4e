"""From the name of a model to the folder it lies in."""

from __future__ import annotations

import json
from pathlib import Path

from millrace_launcher.children import Children, explain
from millrace_launcher.commands import Commands
from millrace_launcher.errors import DownloadError
from millrace_launcher.logs import log, relay

GRACE_SECONDS = 10.0


async def resolve_model(commands: Commands, children: Children) -> Path:
    """Run the download, whose last line of stdout names the folder. Raises DownloadError."""
    log.info("Starting check and download process for %s", commands.model_name)
    last = ""

    def on_line(line: str) -> None:
        nonlocal last
        relay(last, source="download")
        last = line

    process = await children.start(commands.download(), on_line)
    try:
        code = await process.wait()
    finally:
        if process.is_running:
            await process.terminate(GRACE_SECONDS)
    folder = _folder_of(last)
    if code != 0 or folder is None:
        relay(last, source="download")
        explain(process, "Download encountered an error")
        raise DownloadError
    log.info("Successfully resolved the model to %s", folder)
    return folder


def _folder_of(line: str) -> Path | None:
    try:
        return Path(json.loads(line)["model_folder"])
    except (ValueError, KeyError, TypeError):
        return None
