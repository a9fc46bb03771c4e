"""Events of a stream, whatever chunks they come in."""

from __future__ import annotations

import pytest

from millrace.http.sse import EventReader

STREAM = b': hello\n\nevent: a\ndata: {"x":\ndata: 1}\n\ndata:two\r\n\r\nid: 3\n\ndata: [DONE]\n\n'
EVENTS = [b'{"x":\n1}', b"two"]


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_any_cut_gives_the_same_events(size: int) -> None:
    reader = EventReader()
    chunks = [STREAM[place : place + size] for place in range(0, len(STREAM), size)]
    assert [data for chunk in chunks for data in reader.feed(chunk)] == EVENTS
    assert reader.rest == b""


def test_a_cut_stream_has_a_rest() -> None:
    reader = EventReader()
    assert list(reader.feed(STREAM[:30])) == []
    assert reader.rest != b""
