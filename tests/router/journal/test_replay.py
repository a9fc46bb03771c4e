"""Replays of journals on a hash shard: equal answers, or the first difference."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import cast

import pytest

from millrace_proto import generate_pb2 as pb
from millrace_router.journal.frames import JournalUnusable, read_frames
from millrace_router.journal.header import Header, header_from_json, header_to_json
from millrace_router.journal.journal import Journal
from millrace_router.journal.reader import (
    AdapterChanged,
    Answered,
    Failed,
    ImagePut,
    Sent,
    read_epochs,
    read_events,
)
from millrace_router.journal.replay.command import replay
from millrace_router.journal.replay.comparison import Comparison
from millrace_router.journal.replay.player import Player, Unanswered, settled, token_at
from millrace_router.journal.rotation import JournalFolder, journal_files
from millrace_router.journal.writer import JournalWriter
from millrace_router.request.block_hashes import BlockHashes
from millrace_router.request.images import PreparedImage
from millrace_router.scheduler.step_plan import Budgets
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.step_channel import StepChannel
from millrace_router.telemetry.instruments import Counter
from millrace_testing.router.fake_router import collect, ids_of, new_batcher, request, running
from millrace_testing.router.journals import (
    BUDGETS,
    RecordedDriver,
    ReplayShards,
    header,
    journal_in,
    new_shard,
    player_of,
    replayed,
    requests,
)
from millrace_testing.shards.fake_shard import FakeShard, continuation, serve_fake_shard
from millrace_testing.shards.hash_shard import HashShard


def record(
    folder: Path,
    *,
    count: int = 16,
    keeps_tokens: bool = True,
    deterministic: bool = True,
    budgets: Budgets = BUDGETS,
    max_draft_tokens: int = 0,
    meanwhile: Callable[[RecordedDriver], None] | None = None,
) -> RecordedDriver:
    """Record requests that arrive while others run; `meanwhile` is called in the middle."""
    shard = new_shard(max_draft_tokens=max_draft_tokens)
    head = header(shard, keeps_tokens=keeps_tokens, deterministic=deterministic)
    journal, writer, _ = journal_in(folder, head)
    driver = RecordedDriver(budgets, shard, journal)
    for number, asked in enumerate(requests(count)):
        driver.submit(asked)
        driver.turn()
        if meanwhile is not None and number == count // 2:
            meanwhile(driver)
    driver.run()
    writer.close()
    return driver


async def test_the_same_shard_answers_the_same(tmp_path: Path) -> None:
    driver = record(tmp_path)
    again = new_shard()
    (outcome,) = await replayed(tmp_path, again)
    assert outcome.difference is None
    assert outcome.is_compared
    assert outcome.num_steps == len(driver.shard.steps) - 1
    assert sum(len(client.tokens) for client in driver.clients.values()) <= outcome.num_tokens
    strip = [_anonymous(step) for step in driver.shard.steps]
    assert [_anonymous(step) for step in again.steps] == strip


def _anonymous(step: pb.StepRequest) -> bytes:
    copy = pb.StepRequest()
    copy.CopyFrom(step)
    copy.epoch = 0
    return copy.SerializeToString()


async def test_rows_of_several_tokens_are_the_same_too(tmp_path: Path) -> None:
    budgets = Budgets(
        max_batch_prefill_tokens=30, max_batch_size=6, spare_slots=2, max_draft_tokens=3
    )
    driver = record(tmp_path, budgets=budgets, max_draft_tokens=3)
    assert any(step.decode.draft_tokens for step in driver.shard.steps)
    (outcome,) = await replayed(tmp_path, new_shard(max_draft_tokens=3))
    assert outcome.difference is None
    assert outcome.num_tokens > 50


class Liar(HashShard):
    """Answers all steps but one correctly."""

    def __init__(self, step: int, lie: Callable[[pb.StepResponse], None]) -> None:
        like = new_shard()
        super().__init__(
            num_blocks=like.num_blocks,
            block_size=like.block_size,
            max_batch_size=like.max_batch_size,
            choices=like.choices,
        )
        self._at, self._lie = step, lie

    def step(self, request: pb.StepRequest) -> pb.StepResponse:
        answer = super().step(request)
        if request.number == self._at:
            self._lie(answer)
        return answer


def step_with_tokens(driver: RecordedDriver, *, least: int) -> tuple[int, int]:
    """Number of a step, and the slot, where a sequence yields a token that is not its first."""
    seen: set[int] = set()
    for step in driver.shard.steps:
        if step.number >= least:
            for slot in step.decode.decode_slots:
                return step.number, slot
        seen.update(step.decode.decode_slots)
    raise AssertionError("no such step")


async def test_a_different_token_is_reported_at_its_position(tmp_path: Path) -> None:
    driver = record(tmp_path)
    number, slot = step_with_tokens(driver, least=9)

    def lie(answer: pb.StepResponse) -> None:
        index = list(answer.slots).index(slot)
        answer.ids[index] += 1
        answer.logprobs[index] -= 0.25

    (outcome,) = await replayed(tmp_path, Liar(number, lie))
    difference = outcome.difference
    assert difference is not None
    assert (difference.what, difference.gap) == ("token", 0.25)
    assert (difference.step, difference.slot) == (number, slot)
    position, was, request_id = oracle(driver, number, slot)
    assert (difference.position, difference.request_id) == (position, request_id)
    assert difference.recorded.startswith(f"{was} (")
    assert difference.replayed.startswith(f"{was + 1} (")
    assert outcome.num_steps == number, "what comes after it is not compared"


def oracle(driver: RecordedDriver, number: int, slot: int) -> tuple[int, int, int]:
    """Position, id and request of the token that step `number` yields in `slot`, from the state of a shard."""
    shard = new_shard()
    for step in driver.shard.steps:
        shard.answered = max(0, step.number - 1)
        shard.step(step)
        if step.number == number:
            running = shard.running[slot]
            return len(running.ids) - 1, running.ids[-1], running.pb.request_id
    raise AssertionError("no such step")


def _nudge(answer: pb.StepResponse) -> None:
    answer.logprobs[-1] += 1e-6


def _forget(answer: pb.StepResponse) -> None:
    for column in (answer.slots, answer.counts, answer.ids, answer.logprobs):
        column.pop()


def _candidate(answer: pb.StepResponse) -> None:
    answer.top_counts.extend([0] * (len(answer.ids) - 1) + [1])
    answer.top_ids.append(3)
    answer.top_logprobs.append(-1.0)


LIES: dict[str, tuple[str, Callable[[pb.StepResponse], None]]] = {
    "logprob": ("log probability", _nudge),
    "fewer": ("number of tokens", _forget),
    "failed": ("failed rows", lambda answer: answer.failed_slots.append(answer.slots[0])),
    "candidates": ("candidates", _candidate),
}


@pytest.mark.parametrize("name", LIES)
async def test_other_differences_have_their_names(tmp_path: Path, name: str) -> None:
    what, lie = LIES[name]
    number, _ = step_with_tokens(record(tmp_path), least=7)
    (outcome,) = await replayed(tmp_path, Liar(number, lie))
    assert outcome.difference is not None
    assert (outcome.difference.what, outcome.difference.step) == (what, number)


async def test_log_probabilities_of_prompts_are_compared(tmp_path: Path) -> None:
    driver = record(tmp_path)
    answers = iter(driver.shard.steps)
    number = next(
        step.number
        for step in answers
        if any(each.prefill_logprobs for each in step.prefill.change.admitted) and step.number > 1
    )

    def lie(answer: pb.StepResponse) -> None:
        answer.prefill_logprobs[-1] += 0.5

    (outcome,) = await replayed(tmp_path, Liar(number, lie))
    assert outcome.difference is not None
    assert outcome.difference.what == "log probability of the prompt"
    assert (outcome.difference.step, outcome.difference.gap) == (number, 0.5)


async def test_candidates_of_prompts_are_compared(tmp_path: Path) -> None:
    driver = record(tmp_path)
    number = next(
        step.number
        for step in driver.shard.steps
        if any(each.prefill_top_n_tokens for each in step.prefill.change.admitted)
        and step.number > 1
    )

    def lie(answer: pb.StepResponse) -> None:
        answer.prefill_top_ids[-1] += 1

    (outcome,) = await replayed(tmp_path, Liar(number, lie))
    assert outcome.difference is not None
    assert outcome.difference.what == "candidates of the prompt"
    assert outcome.difference.step == number
    assert outcome.difference.recorded != outcome.difference.replayed


@pytest.mark.parametrize(
    ("deterministic", "info"),
    [(False, {}), (True, {"attention": "another"}), (True, {"quantize_activations": "int8"})],
    ids=["fast-mode", "other-kernels", "other-activations"],
)
async def test_where_bits_are_not_promised_only_tokens_count(
    tmp_path: Path, deterministic: bool, info: dict[str, str]
) -> None:
    driver = record(tmp_path, deterministic=deterministic)
    number, _ = step_with_tokens(driver, least=7)
    (outcome,) = await replayed(tmp_path, Liar(number, _nudge), **info)
    assert outcome.difference is None
    assert outcome.largest_gap == pytest.approx(1e-6, rel=0.1)


async def test_shards_that_speculate_otherwise_are_noted() -> None:
    player = Player(cast("StepChannel", ReplayShards(new_shard())), step_seconds=30.0)
    notes = await player.notes(header(new_shard(max_draft_tokens=3)))
    assert notes == ["recorded with max_draft_tokens 3, replayed with 0"]


async def test_shards_that_round_otherwise_are_noted() -> None:
    player = Player(cast("StepChannel", ReplayShards(new_shard())), step_seconds=30.0)
    recorded = header(new_shard())
    recorded = replace(recorded, shard=replace(recorded.shard, quantize_activations="int8"))
    (note,) = await player.notes(recorded)
    assert note == "recorded with quantize_activations int8, replayed with None"


async def test_without_token_ids_the_schedule_is_replayed(tmp_path: Path) -> None:
    driver = record(tmp_path, keeps_tokens=False, budgets=NEVER_PREEMPTED)
    again = new_shard()
    (outcome,) = await replayed(tmp_path, again)
    assert outcome.difference is None
    assert not outcome.is_compared
    for was, now in zip(driver.shard.steps, again.steps, strict=True):
        assert was.WhichOneof("work") == now.WhichOneof("work")
        assert list(was.decode.decode_slots) == list(now.decode.decode_slots)
        assert list(was.prefill.chunk_tokens) == list(now.prefill.chunk_tokens)
        for asked, made in zip(
            was.prefill.change.admitted, now.prefill.change.admitted, strict=True
        ):
            assert len(asked.input_ids) == len(made.input_ids)
            assert asked.parameters.seed == made.parameters.seed
            assert list(made.input_ids) == [token_at(i, 97) for i in range(len(made.input_ids))]


NEVER_PREEMPTED = Budgets(
    max_batch_prefill_tokens=16, max_batch_size=3, spare_slots=2, reserve_all=True
)
"""Cached blocks hold only prompts: without token ids, a replay cannot fill blocks of answers."""


async def test_a_failed_epoch_is_replayed_up_to_the_step_that_failed(tmp_path: Path) -> None:
    def fail(driver: RecordedDriver) -> None:
        driver.shard.fail_next = "the device caught fire"

    record(tmp_path, meanwhile=fail)
    first, second = await replayed(tmp_path, new_shard())
    assert first.difference is None
    assert second.difference is None
    assert first.failure is not None
    assert first.failure.reason == "the device caught fire"
    assert first.unanswered == first.failure.unanswered
    assert first.unanswered[0] == first.num_steps + 1
    assert second.failure is None


@pytest.mark.parametrize("only", [[1, 2, 3], [2, 3], [3], [1, 3]])
@pytest.mark.parametrize("keeps_tokens", [True, False])
async def test_an_epoch_that_began_with_kept_kv_replays_after_the_others_and_alone(
    tmp_path: Path, only: list[int], keeps_tokens: bool
) -> None:
    def cut_twice(driver: RecordedDriver) -> None:
        driver.cut_with_kept_kv()
        driver.turn()
        driver.send()
        driver.cut_with_kept_kv()

    driver = record(tmp_path, meanwhile=cut_twice, keeps_tokens=keeps_tokens)
    admitted = [each for step in driver.shard.steps for each in step.prefill.change.admitted]
    assert any(each.cached_tokens % driver.shard.block_size for each in admitted)
    shard = new_shard()
    shard.keeps_kv = True
    player = player_of(shard)
    outcomes = [await player.play(one) for one in read_epochs(tmp_path) if one.index in only]
    assert [outcome.epoch.index for outcome in outcomes] == only
    assert [outcome.difference for outcome in outcomes] == [None] * len(only)
    assert all(outcome.num_steps for outcome in outcomes)
    assert shard.violation is None


async def test_a_step_that_fails_in_the_replay_is_a_difference(tmp_path: Path) -> None:
    record(tmp_path)
    shard = Liar(5, lambda _: setattr(shard, "fail_next", "now it burns"))
    (outcome,) = await replayed(tmp_path, shard)
    assert outcome.difference is not None
    assert (outcome.difference.step, outcome.difference.replayed) == (6, "now it burns")


def test_unanswered_messages_come_last() -> None:
    sent = [Sent(0, pb.StepRequest(number=number)) for number in range(1, 6)]
    answered = [Answered(0, pb.StepResponse(number=number)) for number in range(1, 4)]
    failed = Failed(0, "lost", "gone", (4, 5))
    events: list[Sent | Answered] = []
    events += [sent[0], sent[1], answered[0], sent[2], answered[1], sent[3], answered[2], sent[4]]
    expected = [*events[:5], answered[2], failed, Unanswered((4, 5))]
    assert list(settled([*events, failed])) == expected


@pytest.mark.parametrize("change", ["vocab_size", "block_size", "model_type"])
async def test_shards_of_another_kind_are_refused(tmp_path: Path, change: str) -> None:
    record(tmp_path, count=2)
    other: object = "llama" if change == "model_type" else 7
    with pytest.raises(JournalUnusable, match=change):
        await replayed(tmp_path, new_shard(), **{change: other})


def test_a_comparison_counts_equal_tokens() -> None:
    comparison = Comparison(is_exact=True)
    comparison.admit(pb.Sequence(slot=3, request_id=9, input_ids=[1, 2]))
    answer = pb.StepResponse(number=1, slots=[3], counts=[2], ids=[5, 6], logprobs=[-1, -2])
    assert comparison.answered(answer, answer) is None
    assert comparison.num_tokens == 2


# From here on over real sockets, by the command.


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/shard"


async def record_over_sockets(
    address: str, folder: Path, *, keeps_tokens: bool = True, has_kv_store: bool = False
) -> None:
    """Record a batcher over a real channel to a fake shard, whose blocks are sealed if it has a KV store."""
    shard = FakeShard()
    shard.lives = count(1) if has_kv_store else None
    with serve_fake_shard(address, shard):
        shards = StepChannel(ShardGroup([address]))
        info = await shards.group.info()
        capacity = await shards.group.warm_up(
            max_batch_prefill_tokens=16,
            max_batch_size=shard.max_batch_size,
            max_concurrent_requests=16,
            max_input_tokens=None,
            max_total_tokens=None,
            max_batch_total_tokens=None,
        )
        head = Header(
            life="one",
            version="0",
            model_id="fake",
            model_sha="abc",
            keeps_tokens=keeps_tokens,
            shard=info,
            warmup=shards.group.warmup_fields,
            capacity=capacity,
        )
        shards.observer = journal = Journal(
            JournalWriter(JournalFolder(folder, max_bytes=1 << 20), head), Counter()
        )
        async with running(new_batcher(shards, shard)) as batcher:
            streams = [batcher.submit(request([number, 7], 9)) for number in range(5)]
            for number, stream in enumerate(streams):
                assert ids_of(await collect(stream)) == continuation([number, 7], 9)
        await journal.close()
        await shards.close()


def test_the_command_reports_equal_epochs(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(record_over_sockets(address, tmp_path / "journal"))
    shard = FakeShard()
    with serve_fake_shard(address, shard):
        arguments = [str(tmp_path / "journal"), f"--shard-addresses={address}"]
        assert replay(arguments) == 0
        table = capsys.readouterr().out
        assert replay([*arguments, "--json", "--epoch=1"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert replay([*arguments, "--epoch=2"]) == 2
        assert "no such epoch" in capsys.readouterr().err
    assert "fake (abc), fake, float32, 1 rank, 64 blocks of 4" in table
    lines = table.splitlines()
    (row,) = (line for line in lines if line.endswith("equal"))
    assert row.split()[0] == "1"
    (epoch,) = report["epochs"]
    assert (report["equal"], report["compared"], epoch["difference"]) == (True, True, None)
    assert epoch["tokens"] >= 45


def test_the_command_reports_a_difference(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(record_over_sockets(address, tmp_path / "journal"))
    shard = FakeShard()
    shard.eos_after = {3: 4}
    with serve_fake_shard(address, shard):
        arguments = [str(tmp_path / "journal"), f"--shard-addresses={address}"]
        assert replay(arguments) == 1
        assert "DIFFERENT" in (table := capsys.readouterr().out)
        assert replay([*arguments, "--json"]) == 1
        report = json.loads(capsys.readouterr().out)
    difference = report["epochs"][0]["difference"]
    assert difference["what"] == "token"
    assert (difference["request_id"], difference["position"]) == (3, 2 + 4)
    assert difference["replayed"].startswith("96 ")
    assert (
        f"first difference at step {difference['step']}, slot {difference['slot']}, request 3"
        in table
    )


def test_the_command_reports_that_nothing_is_compared(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(record_over_sockets(address, tmp_path / "journal", keeps_tokens=False))
    with serve_fake_shard(address, FakeShard()):
        arguments = [str(tmp_path / "journal"), f"--shard-addresses={address}"]
        assert replay(arguments) == 0
    table = capsys.readouterr().out
    assert "not compared" in table
    assert "holds no token ids" in table


def test_no_key_of_a_block_is_written_without_tokens_and_replays_go_on(
    address: str, tmp_path: Path
) -> None:
    whole, kept = b"", b""
    for name, keeps_tokens in (("whole", True), ("kept", False)):
        folder = tmp_path / name
        asyncio.run(
            record_over_sockets(address, folder, keeps_tokens=keeps_tokens, has_kv_store=True)
        )
        (file,) = journal_files(folder)
        with file.open("rb") as stream:
            whole, kept = kept, b"".join(read_frames(stream))
        with serve_fake_shard(address, FakeShard()):
            assert replay([str(folder), f"--shard-addresses={address}"]) == 0
    for number in range(5):
        prompt = [number, 7]
        for key in BlockHashes(4).first(2, prompt, continuation(prompt, 9)):
            assert key in whole, "the test would not see it"
            assert key not in kept


def test_journals_that_cannot_be_replayed_are_refused(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("hello, this is not a journal")
    for path, words in (
        ("empty", "contains no journal"),
        ("none", "does not exist"),
        ("text", "is not a jo"),
    ):
        assert replay([str(tmp_path / path), f"--shard-addresses={address}"]) == 2
        assert words in capsys.readouterr().err
    asyncio.run(record_over_sockets(address, tmp_path / "journal"))
    arguments = [str(tmp_path / "journal"), f"--shard-addresses={address}"]
    assert replay([*arguments, "--step-timeout=0.2"]) == 2, "no shard listens"
    capsys.readouterr()
    with serve_fake_shard(address, FakeShard(num_blocks=9)):
        assert replay(arguments) == 2
    assert "Not enough memory" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        replay([])
    assert ended.value.code == 2


def record_adapters(folder: Path, *, fails: bool = False) -> RecordedDriver:
    """Run requests with adapters, of which the shard holds two at a time."""
    shard = new_shard(max_adapters=2)
    journal, writer, _ = journal_in(folder, header(shard))
    driver = RecordedDriver(BUDGETS, shard, journal)
    for number, asked in enumerate(requests(24, adapters=True)):
        driver.submit(asked)
        driver.turn()
        if fails and number == 12:
            shard.fail_next, driver.loses_adapters = "killed", True
    driver.run()
    driver.check_idle()
    writer.close()
    return driver


async def test_a_journal_with_adapters_replays(tmp_path: Path) -> None:
    driver = record_adapters(tmp_path)
    assert driver.shard.adapters.num_read.total() > 8, "no adapter was evicted"
    shard = new_shard(max_adapters=2)
    (outcome,) = await replayed(tmp_path, shard)
    assert outcome.difference is None
    assert outcome.is_compared
    assert outcome.num_tokens > 100
    assert shard.adapters.num_read == driver.shard.adapters.num_read


async def test_another_epoch_begins_with_the_loads_of_its_own(tmp_path: Path) -> None:
    record_adapters(tmp_path, fails=True)
    first, second = await replayed(tmp_path, new_shard(max_adapters=2))
    assert first.difference is None
    assert second.difference is None
    assert second.num_tokens > 20


def test_a_journal_has_digests_and_no_names(tmp_path: Path) -> None:
    record_adapters(tmp_path)
    found = [event for _, event in read_events(tmp_path) if isinstance(event, AdapterChanged)]
    digests = {event.digest for event in found if event.digest is not None}
    assert len(digests) == 5
    assert all(len(digest) == 64 for digest in digests)
    assert any(event.digest is None for event in found), "no slot was freed"


@pytest.mark.parametrize("keeps_tokens", [True, False])
def test_an_image_has_its_size_and_with_tokens_its_digest(
    tmp_path: Path, *, keeps_tokens: bool
) -> None:
    journal, writer, _ = journal_in(tmp_path, header(new_shard(), keeps_tokens=keeps_tokens))
    image = PreparedImage(b"d" * 32, 1, 2, 3, 2, 5, 4, bytes(90))
    journal.sent(pb.StepRequest(epoch=9, open=pb.Open()))
    journal.answered([pb.StepResponse(epoch=9)])
    journal.image_put(9, 1, 8, image)
    writer.close()
    (put,) = (event for _, event in read_events(tmp_path) if isinstance(event, ImagePut))
    assert (put.epoch, put.slot, put.first_row, put.num_tiles) == (9, 1, 8, 3)
    assert (put.height, put.width) == (2, 5)
    assert put.digest == ((b"d" * 32).hex() if keeps_tokens else None)


def test_sequences_that_are_left_out_may_differ() -> None:
    comparison = Comparison(is_exact=True)
    comparison.admit(pb.Sequence(slot=1, input_ids=[5]), is_compared=False)
    comparison.admit(pb.Sequence(slot=2, input_ids=[5]))
    recorded = pb.StepResponse(slots=[1, 2], counts=[1, 1], ids=[3, 4], logprobs=[0.0, 0.0])
    replayed = pb.StepResponse(slots=[1, 2], counts=[1, 1], ids=[9, 4], logprobs=[0.5, 0.0])
    assert comparison.answered(recorded, replayed) is None
    assert comparison.num_tokens == 1
    comparison.admit(pb.Sequence(slot=1, input_ids=[5]))
    difference = comparison.answered(recorded, replayed)
    assert difference is not None
    assert difference.slot == 1


def test_the_header_has_modules_and_pages() -> None:
    head = header(new_shard(max_adapters=2))
    assert head.capacity.adapter_pages == 3
    assert head.shard.adapter_modules
    assert header_from_json(header_to_json(head)) == head
