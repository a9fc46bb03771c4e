"""A journal that commit 1c8e212 recorded, with fields that have left the wire, is read and replayed."""

from __future__ import annotations

from pathlib import Path

from google.protobuf.unknown_fields import UnknownFieldSet

from millrace_router.journal.frames import read_frames, split
from millrace_router.journal.header import header_from_json, header_to_json
from millrace_router.journal.reader import Sent, read_epochs, read_events
from millrace_router.journal.rotation import journal_files
from millrace_testing.router.journals import new_shard, replayed

FORMAT_1 = Path(__file__).parent / "data" / "format_1"
"""Two files: 24 requests of `journals.requests` to a hash shard with up to 3 draft tokens for each row and step."""


async def test_a_journal_with_batch_ids_replays() -> None:
    sent = [event.message for _, event in read_events(FORMAT_1) if isinstance(event, Sent)]
    decodes = [message.decode for message in sent if message.HasField("decode")]
    assert any(decode.draft_tokens for decode in decodes)
    # `batch_id` was field 1.
    assert all(UnknownFieldSet(decode)[0].field_number == 1 for decode in decodes)
    (outcome,) = await replayed(FORMAT_1, new_shard(max_draft_tokens=3))
    assert outcome.difference is None
    assert outcome.is_compared
    assert outcome.num_steps == len(sent) - 1
    assert outcome.num_tokens > 150


def test_the_header_is_written_as_it_was() -> None:
    for file in journal_files(FORMAT_1):
        with file.open("rb") as stream:
            header = next(split(next(read_frames(stream)))).payload
        assert header_to_json(header_from_json(header)) == header


async def test_an_epoch_without_its_beginning_is_skipped() -> None:
    first, second = journal_files(FORMAT_1)
    assert list(read_epochs(second)) == []
    (alone,) = await replayed(first, new_shard(max_draft_tokens=3))
    assert alone.difference is None
    assert alone.num_tokens > 50
