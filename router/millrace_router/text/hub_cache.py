"""Models in the local cache of the Hugging Face hub's client."""

from __future__ import annotations

import re
from pathlib import Path

from millrace_router.text.model_files import ModelFilesError

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
DEFAULT_REVISION = "main"


def find_snapshot(name: str, *, revision: str | None, cache: Path) -> Path:
    """The folder with one commit's files of the model `name`; its own name is the commit.

    `revision` is a branch, tag or commit. Raises ModelFilesError with the remedy in its text.
    """
    if HUB_NAME.fullmatch(name):
        model = cache / f"models--{name.replace('/', '--')}"
        reference = revision or DEFAULT_REVISION
        try:
            commit = (model / "refs" / reference).read_text().strip()
        except OSError:
            commit = reference
        folder = model / "snapshots" / commit
        if folder.is_dir():
            return folder
    at = f" at revision {revision}" if revision else ""
    option = f" --revision {revision}" if revision else ""
    raise ModelFilesError(
        f"--tokenizer-name {name} is neither a folder nor, in {cache}, a downloaded model{at}; download it with"
        f" `text-generation-server download-weights {name}{option}`, or set HF_HOME to the cache that has it"
    )
