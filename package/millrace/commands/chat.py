"""`millrace chat [URL | MODEL]`: a chat in the terminal with a running server, or with a model that it loads."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from millrace.chat import Conversation, Screen, Session
from millrace.commands.parser import Parser, positive, split
from millrace.errors import MillraceError
from millrace.http.client import Client, is_url
from millrace.images import image_part
from millrace.server import serving

PROGRAM = "millrace chat"


def main(argv: Sequence[str]) -> int:
    """Chat until the user ends it. Returns 1 without a server, or if a line from a pipe got no answer."""
    words, flags = split(argv)
    parser = _parser()
    given = parser.parse_args(words)
    if flags and given.target is not None and is_url(given.target):
        parser.error("flags after -- are for a server of this command's own, not for a URL")
    try:
        return _chat(given, flags)
    except MillraceError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _chat(given: argparse.Namespace, flags: Sequence[str]) -> int:
    screen = Screen()
    with ExitStack() as stack:
        url = given.target
        if url is None or not is_url(url):
            url = stack.enter_context(serving(url, flags, program=PROGRAM))
        runner = stack.enter_context(asyncio.Runner())
        client = Client(url, given.api_key)
        runner.run(client.open())
        stack.callback(lambda: runner.run(client.close()))
        model = given.model or runner.run(client.first_model())
        parameters = {
            "model": model,
            "max_tokens": given.max_tokens,
            "temperature": given.temperature,
            "top_p": given.top_p,
            "seed": given.seed,
        }
        conversation = Conversation(
            system=given.system,
            parameters={name: value for name, value in parameters.items() if value is not None},
            images=given.image,
        )
        return Session(client, conversation, screen).run(runner)


def _image(path: str) -> dict[str, Any]:
    try:
        return image_part(Path(path))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None


def _parser() -> Parser:
    parser = Parser(
        PROGRAM,
        usage="[URL | MODEL] [FLAG ...] [-- LAUNCHER_FLAG ...]",
        description="Chats with any OpenAI-compatible server, or starts one for a model. Lines of a pipe are\n"
        "messages too: echo 'What is a KV cache?' | millrace chat URL",
    )
    add = parser.add_argument
    add("target", nargs="?", metavar="URL | MODEL", help="the demo model when absent")
    add(
        "--image",
        action="append",
        default=[],
        type=_image,
        metavar="FILE",
        help="an image of the first message; may be repeated",
    )
    add("--system", metavar="TEXT", help="the system message")
    add("--model", metavar="NAME", help="model or adapter of the server; the first when absent")
    add("--max-tokens", type=positive, metavar="N", help="longest answer, in tokens")
    add("--temperature", type=float, metavar="X", help="0 takes the likeliest token")
    add("--top-p", type=float, metavar="X", help="least probability that the kept tokens share")
    add("--seed", type=int, metavar="N", help="of the random numbers")
    parser.add_api_key()
    return parser
