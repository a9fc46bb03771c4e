"""`millrace download MODEL`: bring the files of a model to the cache, and print its folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from millrace.commands.parser import Parser
from millrace.download import download
from millrace_launcher.errors import LaunchError
from millrace_launcher.settings.arguments import read_settings
from millrace_proto.flags import option_name

PROGRAM = "millrace download"
FORWARDED = ("revision", "draft_model", "tokenizer_name", "mmproj", "huggingface_hub_cache")
"""Flags of the launcher that say which files are meant, and where they go."""


def main(argv: Sequence[str]) -> int:
    """Print the model's folder on stdout, with progress on stderr; 1 where the model cannot be had."""
    given = _parser().parse_args(argv)
    words = (
        f"{option_name(name)}={value}"
        for name in FORWARDED
        if (value := getattr(given, name)) is not None
    )
    settings = read_settings([f"--model-id={given.model}", *words], program=PROGRAM)
    try:
        folders = download(settings, given.model)
    except LaunchError as error:
        sys.stderr.write(f"Error: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{folders.model}\n")
    return 0


def _parser() -> Parser:
    parser = Parser(
        PROGRAM,
        usage="MODEL [FLAG ...]",
        description="Downloads what `millrace serve MODEL` needs, and prints the model's folder.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="hub name, ORG/REPO:TYPE, folder, GGUF file or smollm2")
    add("--revision", metavar="NAME", help="branch, tag or commit of the model on the hub")
    add("--draft-model", metavar="MODEL", help="a draft model, which is downloaded as well")
    add("--tokenizer-name", metavar="MODEL", help="with a GGUF file, whose tokenizer is used")
    add("--mmproj", metavar="FILE", help="with a GGUF file, the file that reads images, or off")
    add("--huggingface-hub-cache", metavar="DIR", help="folder that models are downloaded to")
    return parser
