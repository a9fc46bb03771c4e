"""`download-weights`: resolve the names of a model and its draft model to local folders."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence

from millrace_proto.flags import log_level
from millrace_shard.errors import ModelError
from millrace_shard.logs import configure
from millrace_shard.speculation.checkpoints import Checkpoints
from millrace_shard.variables import Variables
from millrace_shard.weights.download import REPORT_SECONDS
from millrace_shard.weights.hub import HubSettings

SAFETENSORS = ".safetensors"

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a JSON object as the last line of stdout: `model_folder`, and `draft_folder` where there is a draft model.

    Returns 1 after an error in the log when a name cannot be resolved.
    """
    arguments = _parser().parse_args(argv)
    configure(arguments.logger_level, json_output=arguments.json_output)
    _warn_of_unused_flags(arguments)
    try:
        checkpoints = Checkpoints.find(
            arguments.model_id,
            draft_model=arguments.draft_model,
            revision=arguments.revision,
            settings=HubSettings.of(
                Variables(),
                progress_seconds=arguments.progress_seconds,
                needs_weights=not arguments.without_weights,
            ),
            tokenizer=arguments.tokenizer_name,
            mmproj=arguments.mmproj,
        )
    except ModelError as error:
        log.error("%s", error)  # noqa: TRY400
        return 1
    folders = {"model_folder": str(checkpoints.model)}
    if checkpoints.draft is not None:
        folders["draft_folder"] = str(checkpoints.draft)
    sys.stdout.write(json.dumps(folders) + "\n")
    sys.stdout.flush()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="millrace-shard download-weights", description=__doc__)
    parser.add_argument(
        "model_id",
        help="a folder, a GGUF file, a name on the hub, or smollm2; ORG/REPO:TYPE is a GGUF file on the hub",
    )
    parser.add_argument("--revision", default=Variables().revision)
    parser.add_argument(
        "--draft-model", help="draft model or heads: a folder or a name on the hub; or mtp"
    )
    parser.add_argument(
        "--tokenizer-name",
        help="with a GGUF file, the model whose tokenizer is used: a folder or a name on the hub",
    )
    parser.add_argument(
        "--mmproj",
        help="with a GGUF file, the mmproj file that reads images, or off; without, one next to it",
    )
    parser.add_argument(
        "--without-weights",
        action="store_true",
        help="only configuration and tokenizer, for a router whose ranks are on other hosts",
    )
    parser.add_argument("--json-output", action="store_true", help="logs as JSON lines")
    parser.add_argument(
        "--logger-level", default="info", type=log_level, help="least severity that is logged"
    )
    parser.add_argument(
        "--progress-seconds",
        default=REPORT_SECONDS,
        type=float,
        help="time between two lines about a download",
    )
    # TGI's flags of this command that have no effect here.
    parser.add_argument("--extension", default=SAFETENSORS, help=argparse.SUPPRESS)
    for flag in ("--auto-convert", "--trust-remote-code", "--merge-lora"):
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
    return parser


def _warn_of_unused_flags(arguments: argparse.Namespace) -> None:
    if arguments.extension != SAFETENSORS:
        log.warning("--extension has no effect: only %s files are loaded", SAFETENSORS)
    if arguments.auto_convert:
        log.info("--auto-convert has no effect: `millrace-shard convert` makes safetensors")
    if arguments.trust_remote_code:
        log.info("--trust-remote-code has no effect: code from a model repository is never run")
    if arguments.merge_lora:
        log.info("--merge-lora has no effect: an adapter without its base model is refused")
