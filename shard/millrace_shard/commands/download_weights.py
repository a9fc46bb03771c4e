"""`download-weights`: a model's name to a local folder, and that of what guesses for it to another."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from millrace_shard.errors import ModelError
from millrace_shard.model_loader.hub import HubSettings
from millrace_shard.speculation.checkpoints import Checkpoints

log = logging.getLogger(__name__)


class _JsonLines(logging.Formatter):
    """The line format that the launcher relays."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "timestamp": datetime.fromtimestamp(record.created, tz=UTC).isoformat(),
            "level": record.levelname,
            "fields": {"message": record.getMessage()},
            "target": record.name,
        }
        return json.dumps(line)


def main(argv: Sequence[str] | None = None) -> int:
    """Resolve what the command line names; the last line of stdout is a JSON object with `model_folder`.

    And with `draft_folder` where something guesses for that model.
    """
    parser = argparse.ArgumentParser(prog="millrace-shard download-weights", description=__doc__)
    parser.add_argument("model_id", help="a folder or a name on the hub")
    parser.add_argument("--revision", default=os.environ.get("REVISION") or None)
    parser.add_argument("--draft-model", help="what guesses ahead: a folder or a name on the hub")
    parser.add_argument("--json-output", action="store_true", help="logs as JSON lines")
    # TGI's flags of this command that change nothing here.
    parser.add_argument("--extension", default=".safetensors", help=argparse.SUPPRESS)
    parser.add_argument("--logger-level", default="INFO", help=argparse.SUPPRESS)
    for flag in ("--trust-remote-code", "--merge-lora"):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)

    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        _JsonLines() if arguments.json_output else logging.Formatter("%(message)s")
    )
    package = logging.getLogger("millrace_shard")
    package.setLevel(logging.INFO)
    package.addHandler(handler)
    try:
        found = Checkpoints.find(
            arguments.model_id,
            draft_model=arguments.draft_model,
            revision=arguments.revision,
            settings=HubSettings.from_environment(os.environ),
        )
    except ModelError as error:
        log.error("%s", error)  # noqa: TRY400
        return 1
    finally:
        package.removeHandler(handler)
    folders = {"model_folder": str(found.model)}
    if found.draft is not None:
        folders["draft_folder"] = str(found.draft)
    sys.stdout.write(json.dumps(folders) + "\n")
    sys.stdout.flush()
    return 0
