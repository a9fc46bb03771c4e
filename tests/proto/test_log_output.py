"""Logs to readers that read, that stop for a while, and that are gone."""

from __future__ import annotations

import io
import os
import select
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from millrace_proto import log_output
from millrace_proto.log_output import LogOutput, log_text

PIPE_BYTES = 65536


@dataclass
class Pipe:
    """A pipe to an output; the test is its reader."""

    reader: int
    output: LogOutput
    reported: list[int] = field(default_factory=list)

    def read(self) -> bytes:
        return os.read(self.reader, 1 << 20)

    def fill(self) -> None:
        """Write until the pipe has no room, with lines that are each a part of it."""
        for _ in range(PIPE_BYTES // select.PIPE_BUF):
            self.output.write(b"x" * (select.PIPE_BUF - 1) + b"\n")

    def read_all(self, end: bytes) -> bytes:
        """What comes up to `end`."""
        received = b""
        while not received.endswith(end):
            received += self.read()
        return received


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reader, writer = os.pipe()
    reported: list[int] = []
    yield Pipe(reader, LogOutput(writer, reported.append), reported)
    os.close(reader)
    os.close(writer)


def test_lines_are_written_before_the_call_returns(pipe: Pipe) -> None:
    """The last words of a process that crashes are not lost."""
    for number in range(3):
        pipe.output.write(b"%d\n" % number)
    assert pipe.read() == b"0\n1\n2\n"
    assert pipe.output._thread is None


def test_a_reader_that_stops_delays_nobody_and_gets_all_lines_in_order_later(pipe: Pipe) -> None:
    pipe.fill()
    long = b"y" * (3 * PIPE_BYTES) + b"\n"
    lines = [long, *(b"%d\n" % number for number in range(100)), b"end\n"]
    for line in lines:
        assert pipe.output.write(line) == len(line)
    received = pipe.read_all(b"end\n")
    assert received[PIPE_BYTES:] == b"".join(lines)
    assert pipe.reported == []


def test_lines_beyond_the_limit_are_dropped_and_counted(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_output, "MAX_WAITING_LINES", 10)
    pipe.fill()
    for number in range(100):
        pipe.output.write(b"%d\n" % number)
    thread = pipe.output._thread
    assert thread is not None
    received = pipe.read()
    while thread.is_alive():
        if select.select([pipe.reader], [], [], 0.01)[0]:
            received += pipe.read()
    while select.select([pipe.reader], [], [], 0)[0]:
        received += pipe.read()
    lines = received[PIPE_BYTES:].split()
    assert lines[:10] == [b"%d" % number for number in range(10)]
    # The thread takes a line out of the queue at any time, so that a later one has room.
    assert len(lines) in (10, 11)
    assert int(lines[-1]) >= len(lines) - 1
    assert pipe.reported == [100 - len(lines)]
    pipe.output.write(b"again\n")
    assert pipe.read() == b"again\n"


def test_a_reader_that_is_gone_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    output = LogOutput(writer, lambda _: None)
    assert output.write(b"to nobody\n") == 10
    os.close(writer)


def test_text_that_the_terminal_cannot_show_is_escaped() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as received, os.fdopen(writer, "w", encoding="ascii") as stream:
        text = log_text(stream, lambda _: None)
        text.write("größe\n")
        assert received.readline() == b"gr\\xf6\\xdfe\n"


def test_files_and_streams_without_a_descriptor_are_written_directly(tmp_path: Path) -> None:
    memory = io.StringIO()
    assert log_text(memory, lambda _: None) is memory
    with (tmp_path / "log").open("w", encoding="utf-8") as file:
        assert log_text(file, lambda _: None) is file
