"""Reads server-sent events, a chunk of bytes at a time."""

from __future__ import annotations

from collections.abc import Iterator

DONE = b"[DONE]"
"""The last event of OpenAI's streams."""


class EventReader:
    """The data of each event, whatever chunks its bytes come in; comments and other fields are skipped."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The data of the events that end in this chunk, without `[DONE]`."""
        buffer = self._buffer + chunk
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        *blocks, self._buffer = buffer.split(b"\n\n")
        for block in blocks:
            data = _data_of(block)
            if data is not None and data != DONE:
                yield data

    @property
    def rest(self) -> bytes:
        """The bytes after the last whole event; a stream that ends with some was cut."""
        return self._buffer.strip()


def _data_of(block: bytes) -> bytes | None:
    """The data of one event, its lines joined; None where it has none."""
    if block.startswith(b"data:") and b"\n" not in block:
        return block[5:].strip()
    lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
