"""The flags of the cases, and faults that happen once."""

from __future__ import annotations

from dataclasses import replace
from threading import Barrier, Thread

import pytest

from millrace.verify.cases import (
    MOST_ROUNDS,
    After,
    ServerUnderTest,
    chunked_flags,
    crowd,
    preempted_flags,
    speculated,
)
from millrace.verify.client import Client
from millrace.verify.comparison import Verdict
from millrace.verify.questions import Question
from millrace.verify.suite import ServerInfo, Suite
from millrace_testing.launcher.verify import BLOCK, fake_server

INFO = ServerInfo(
    model_id="m",
    dtype="float32",
    device="cpu",
    version="0",
    deterministic=True,
    num_shard=1,
    block_size=BLOCK,
    max_input_tokens=500,
    max_total_tokens=600,
    max_concurrent_requests=32,
    max_batch_total_tokens=6000,
    caches_prefixes=True,
    max_top_n_tokens=5,
    grammars=True,
)


def suite(*sizes: tuple[int, int]) -> Suite:
    """Requests by prompt and answer length."""
    questions = tuple(
        Question(
            text="x", input_ids=tuple(range(num_prompt)), max_new_tokens=num_new, parameters={}
        )
        for num_prompt, num_new in sizes
    )
    return Suite(info=INFO, questions=questions, unrelated=(), expected=())


def flag(flags: tuple[str, ...], name: str) -> int:
    (value,) = [word.partition("=")[2] for word in flags if word.startswith(f"--{name}=")]
    return int(value)


def test_chunks_end_inside_blocks() -> None:
    chunk = flag(chunked_flags(suite((5, 5))), "max-batch-prefill-tokens")
    assert chunk % BLOCK
    assert BLOCK // 2 < chunk < 2 * BLOCK


def test_the_small_cache_has_room_for_the_largest_request_and_one_block() -> None:
    capacity = flag(preempted_flags(suite((5, 5), (30, 20), (1, 1))), "max-batch-total-tokens")
    assert capacity == (4 + 1) * BLOCK


def test_a_crowd_grows_to_more_than_there_is_room_for() -> None:
    asked = suite((5, 5), (5, 3 * BLOCK), (4 * BLOCK, 5))
    order = crowd(asked, server_tokens=10 * BLOCK)
    assert order == [1] * 10 + [0, 2], "40 blocks by those that grow, then the rest"


@pytest.mark.parametrize(
    ("drafted", "accepted", "verdict"),
    [
        (4, 1, Verdict.EQUAL),
        (0, 0, Verdict.NOT_EXERCISED),
        (4, 0, Verdict.NOT_EXERCISED),
        (4, 4, Verdict.NOT_EXERCISED),
    ],
)
def test_speculation_shows_itself_in_accepted_and_rejected_draft_tokens(
    drafted: int, accepted: int, verdict: Verdict
) -> None:
    with fake_server(draft_tokens=(drafted, accepted)) as fake:
        client = Client(fake.url)
        asked = replace(suite((3, 5)), expected=(client.answer(suite((3, 5)).questions[0]),))
        rows = list(speculated(ServerUnderTest(client, lambda: None), asked))
    assert [row.verdict for row in rows] == [verdict] * 2
    rounds = 1 if verdict is Verdict.EQUAL else MOST_ROUNDS
    assert fake.num_answers == 1 + 2 * rounds, "a round is asked again until it shows"


def test_the_action_runs_once_however_many_tokens_come_at_once() -> None:
    faults: list[int] = []
    after = After(50, lambda: faults.append(1))
    start = Barrier(4)

    def tokens() -> None:
        start.wait()
        for _ in range(25):
            after.on_token()

    threads = [Thread(target=tokens) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == [1]


def test_the_action_does_not_run_early() -> None:
    faults: list[int] = []
    after = After(3, lambda: faults.append(1))
    after.on_token()
    after.on_token()
    assert faults == []
    after.on_token()
    assert faults == [1]
