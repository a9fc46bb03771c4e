"""A chat in the terminal: the conversation, what the screen shows, and the loop that reads and answers."""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys
from collections.abc import Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from millrace.errors import MillraceError
from millrace.http.client import Client
from millrace.images import image_part


@dataclass(slots=True)
class Conversation:
    """The messages of a chat; each request begins with the `system` message."""

    system: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    """Fields of the request besides the messages: the model, sampling, the length."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    """Parts of the next message."""

    def ask(self, text: str) -> dict[str, Any]:
        """Add the user's message, and return the body of the request for its answer."""
        content = [*self.images, {"type": "text", "text": text}] if self.images else text
        self.messages.append({"role": "user", "content": content})
        self.images = []
        lead = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {**self.parameters, "messages": [*lead, *self.messages], "stream": True}

    def answered(self, text: str) -> None:
        """Add the answer, or the part of it that was made."""
        self.messages.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Remove the last message, which got no answer; its images are not sent again."""
        self.messages.pop()

    def clear(self) -> None:
        self.messages.clear()
        self.images.clear()

    def lines(self) -> Iterator[str]:
        """Yield each message as text."""
        for message in self.messages:
            content = message["content"]
            if not isinstance(content, str):
                content = " ".join(part.get("text", "(image)") for part in content)
            yield f"{message['role']}: {content}"


PROMPT = "> "
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Screen:
    """Standard input and output. Without a terminal as input nothing prompts, and stdout has only answers."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty()
        self._has_colours = sys.stdout.isatty()
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            # In a locale without some characters, "?" stands for them.
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="replace")
        if self.is_interactive:
            # Its import gives `input` a history and keys to edit; not every Python has it.
            with suppress(ImportError):
                importlib.import_module("readline")

    def read(self) -> str:
        """The user's next line. Raises EOFError at the end, KeyboardInterrupt for Ctrl-C."""
        if self.is_interactive:
            return input(PROMPT)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def write(self, text: str, *, is_thought: bool = False) -> None:
        """Write a piece of an answer; a thought is dim, and only shown on a terminal."""
        if is_thought:
            if not self._has_colours:
                return
            text = f"{DIM}{text}{PLAIN}"
        sys.stdout.write(text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Write a line that is not part of an answer."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


PATH = "/v1/chat/completions"
HELP = """\
/image FILE  add an image to the next message
/history     show the conversation
/clear       begin a new one
/quit        end, as Ctrl-D does
Ctrl-C       stop the answer"""


class Session:
    """One chat with one server."""

    def __init__(self, client: Client, conversation: Conversation, screen: Screen) -> None:
        self._client = client
        self._conversation = conversation
        self._screen = screen

    def run(self, runner: asyncio.Runner) -> int:
        """Talk until the user's end; 1 where a line from a pipe got no answer."""
        status = 0
        if self._screen.is_interactive:
            self._screen.note("Ask something. /help shows the commands.")
        while True:
            try:
                line = self._screen.read().strip()
            except EOFError:
                break
            except KeyboardInterrupt:
                self._screen.note("\n/quit or Ctrl-D ends the chat")
                continue
            if line in ("/quit", "/exit"):
                break
            if line.startswith("/"):
                self._command(line)
            elif line and not self._answer(line, runner):
                status = 1
                if not self._screen.is_interactive:
                    break
        return 0 if self._screen.is_interactive else status

    def _command(self, line: str) -> None:
        if line == "/history":
            for text in self._conversation.lines():
                self._screen.note(text)
        elif line == "/clear":
            self._conversation.clear()
        elif line.startswith("/image "):
            self._add_image(line.removeprefix("/image ").strip())
        elif line == "/help":
            self._screen.note(HELP)
        else:
            self._screen.note(f"unknown command {line}; /help lists the commands")

    def _add_image(self, path: str) -> None:
        try:
            self._conversation.images.append(image_part(Path(path).expanduser()))
        except OSError as error:
            self._screen.note(f"error: {path}: {error.strerror}")
        else:
            self._screen.note("the image goes with the next message")

    def _answer(self, text: str, runner: asyncio.Runner) -> bool:
        """Stream the answer to one message; whether there is one. Ctrl-C ends it, and keeps what was said."""
        pieces: list[str] = []
        body = self._conversation.ask(text)
        try:
            runner.run(self._interruptible(body, pieces))
        except (KeyboardInterrupt, asyncio.CancelledError):
            self._screen.note("\n(stopped)")
        except MillraceError as error:
            self._conversation.take_back()
            self._screen.note(f"error: {error}")
            return False
        else:
            self._screen.write("\n")
        self._conversation.answered("".join(pieces))
        return True

    async def _interruptible(self, body: dict[str, Any], pieces: list[str]) -> None:
        """Stream until Ctrl-C cancels it.

        The runner's own handler has no wake-up, so that a signal just before the loop waits would be seen late.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            await self._stream(body, pieces)
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def _stream(self, body: dict[str, Any], pieces: list[str]) -> None:
        # Closing the stream closes its connection, so that the server stops too.
        async with aclosing(self._client.stream(PATH, body)) as events:
            async for event in events:
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                        self._screen.write(thought, is_thought=True)
                    if piece := delta.get("content"):
                        pieces.append(piece)
                        self._screen.write(piece)
