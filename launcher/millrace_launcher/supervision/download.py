"""Resolves the name of a model to its folder."""

from __future__ import annotations

import json
from pathlib import Path

from millrace_launcher.errors import DownloadError
from millrace_launcher.logs import has_bar, log
from millrace_launcher.processes.children import Children, explain
from millrace_launcher.settings.commands import Commands, ModelFolders

GRACE_SECONDS = 10.0


async def resolve_model(commands: Commands, children: Children) -> ModelFolders:
    """Run the download; a line of its stdout has the folders. Raises DownloadError."""
    log.info("Starting check and download process for %s", commands.model_name)
    folders: ModelFolders | None = None

    def takes_line(line: str) -> bool:
        nonlocal folders
        folders = _folders_of(line)
        return folders is not None

    process = await children.start(commands.download(has_bar=has_bar()), takes_line)
    try:
        code = await process.wait()
    finally:
        if process.is_running:
            await process.terminate(GRACE_SECONDS)
    if code != 0 or folders is None:
        if code == 0 or process.lines.cause is None:
            explain(process, "Download encountered an error")
            raise DownloadError
        process.lines.drop()
        raise DownloadError(process.lines.cause)
    log.info("Successfully resolved the model to %s", folders.model)
    return folders


def _folders_of(line: str) -> ModelFolders | None:
    try:
        found = json.loads(line)
        draft = found.get("draft_folder")
        return ModelFolders(Path(found["model_folder"]), None if draft is None else Path(draft))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
