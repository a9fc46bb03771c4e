"""A chat in a pipe, against a server whose every word is known."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import pty
import signal
import sys
from pathlib import Path

import pytest
from tests.package.programs import OpenAI, run, started

from millrace.chat import HELP, Conversation, Screen, Session
from millrace.http.client import Client
from millrace_testing.router.sse import served_application


async def test_lines_are_messages_and_stdout_has_only_the_answers() -> None:
    server = OpenAI(lambda body: f"answer {len(body['messages'])}")
    async with served_application(server.application()) as url:
        words = ("chat", f"{url}/v1", "--system", "Be short.", "--max-tokens", "9")
        status, out, err = await run(*words, text="One?\n\nTwo?\n/quit\nThree?\n", API_KEY="k")
    assert (status, out) == (0, "answer 2\nanswer 4\n")
    assert err == ""
    first, second = server.bodies
    assert first["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "One?"},
    ]
    assert [message["content"] for message in second["messages"]] == [
        *("Be short.", "One?", "answer 2", "Two?")
    ]
    assert (first["model"], first["max_tokens"], first["stream"]) == ("the-model", 9, True)
    assert "temperature" not in first
    assert server.keys == ["Bearer k"] * 2


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
async def test_any_text_is_read_and_written_in_any_locale(encoding: str) -> None:
    server = OpenAI(lambda body: "Zürich→東京")
    async with served_application(server.application()) as url:
        status, out, err = await run("chat", url, text="Où ça ?\n", PYTHONIOENCODING=encoding)
    assert (status, err) == (0, "")
    assert out == "Zürich→東京\n"
    assert server.bodies[0]["messages"][0]["content"] == "Où ça ?"


async def test_history_lists_the_messages_and_clear_drops_them() -> None:
    server = OpenAI(lambda body: f"answer {len(body['messages'])}")
    async with served_application(server.application()) as url:
        text = "One?\n/history\n/clear\n/what\nTwo?\n"
        status, out, err = await run("chat", url, text=text)
    assert (status, out) == (0, "answer 1\nanswer 1\n")
    assert err.splitlines() == [
        *("user: One?", "assistant: answer 1", "unknown command /what; /help lists the commands")
    ]


async def test_images_go_with_the_next_message_only(tmp_path: Path) -> None:
    files = [tmp_path / "one.png", tmp_path / "two"]
    files[0].write_bytes(b"\x89PNG\r\n\x1a\nrest")
    files[1].write_bytes(b"\xff\xd8\xffrest")
    server = OpenAI(lambda body: f"answer {len(body['messages'])}")
    async with served_application(server.application()) as url:
        text = f"One?\nTwo?\n/image {files[1]}\n/image {tmp_path}/none\nThree?\n/history\n"
        status, _, err = await run("chat", url, "--image", str(files[0]), text=text)
    assert status == 0
    urls = [
        f"data:image/{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"
        for kind, file in zip(("png", "jpeg"), files, strict=True)
    ]
    said = [message["content"] for message in server.bodies[-1]["messages"][::2]]
    assert said == [
        [{"type": "image_url", "image_url": {"url": urls[0]}}, {"type": "text", "text": "One?"}],
        "Two?",
        [{"type": "image_url", "image_url": {"url": urls[1]}}, {"type": "text", "text": "Three?"}],
    ]
    assert err.splitlines() == [
        "the image goes with the next message",
        f"error: {tmp_path}/none: No such file or directory",
        "user: (image) One?",
        "assistant: answer 1",
        "user: Two?",
        "assistant: answer 3",
        "user: (image) Three?",
        "assistant: answer 5",
    ]


async def test_an_interrupt_ends_the_answer_and_not_the_chat() -> None:
    server = OpenAI(lambda body: "one two three" if len(body["messages"]) == 1 else "next")
    server.go_on.clear()
    async with served_application(server.application()) as url:
        process = await started("chat", url)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Count.\n")
        assert await process.stdout.readexactly(3) == b"one"
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        # What is written after this cannot come before the signal.
        await process.stderr.readuntil(b"(stopped)")
        server.go_on.set()
        out, _ = await process.communicate(b"And?\n")
    assert (process.returncode, out.decode()) == (0, "next\n")
    said = [message["content"] for message in server.bodies[-1]["messages"]]
    assert said == ["Count.", "one", "And?"]


async def test_a_refusal_ends_a_pipe_with_the_servers_words() -> None:
    server = OpenAI(lambda body: "refuse")
    async with served_application(server.application()) as url:
        status, out, err = await run("chat", url, text="One?\nTwo?\n")
    assert (status, out, err) == (1, "", "error: no such thing\n")
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        (("http://127.0.0.1:9",), 1, "error: no server at http://127.0.0.1:9: nothing listens"),
        (("http://127.0.0.1:9", "--", "--port=1"), 2, "flags after --"),
        (("--", "--prot=1"), 2, "'--port'"),
        (("/no/folder",), 1, "error: folder /no/folder does not exist"),
        (("--max-tokens", "0"), 2, "--max-tokens"),
        (("--image", "/no/file"), 2, "/no/file: no such file or directory"),
    ],
)
async def test_impossible_chat_commands_are_errors(
    words: tuple[str, ...], status: int, reason: str
) -> None:
    code, out, err = await run("chat", *words)
    assert (code, out) == (status, "")
    assert reason in err.lower()


async def test_chat_starts_its_own_server_for_a_model() -> None:
    words = ("chat", "--temperature=0", "--", "--device=cpu")
    status, out, err = await run(*words, text="What is a KV cache?\n")
    assert (status, err) == (0, "Starting a server for the demo model\n")
    assert out.startswith("The KV cache keeps")


async def test_a_terminal_has_a_prompt_and_ends_with_ctrl_d() -> None:
    server = OpenAI(lambda body: "answer")
    master, slave = pty.openpty()
    async with served_application(server.application()) as url:
        process = await started("chat", url, stdin=slave)
        assert process.stdout is not None
        assert process.stderr is not None
        assert b"/help" in await process.stderr.readline()
        assert await process.stdout.readexactly(2) == b"> "
        os.write(master, b"One?\n")
        assert await process.stdout.readexactly(9) == b"answer\n> "
        os.write(master, b"\x04")
        await process.communicate()
    os.close(master)
    os.close(slave)
    assert process.returncode == 0


class Script(Screen):
    """A terminal whose user does what the test says."""

    def __init__(self, *lines: str | BaseException) -> None:
        super().__init__()
        self.is_interactive = True
        self.notes: list[str] = []
        self._lines = iter(lines)

    def read(self) -> str:
        line = next(self._lines)
        if isinstance(line, BaseException):
            raise line
        return line

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_ctrl_c_at_the_prompt_does_not_end_the_chat() -> None:
    screen = Script(KeyboardInterrupt(), "/help", EOFError())
    with asyncio.Runner() as runner:
        session = Session(Client("http://127.0.0.1:9"), Conversation(), screen)
        assert session.run(runner) == 0
    assert screen.notes[1:] == ["\n/quit or Ctrl-D ends the chat", HELP]


def test_a_locale_without_a_character_shows_another(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    Screen().write("caf\xe9 \u2603")
    assert raw.getvalue() == b"caf? ?"
