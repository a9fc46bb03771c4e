"""The engine with rows of several positions: in order, overlapped, over a model that reads its own KV back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace_proto.sampling import Sampling
from millrace_shard.batch.step import Forward, StepResult
from millrace_shard.speculation.loading import Speculation
from millrace_testing.engines.engine_driver import PROMPT, Driver, forward, ints
from millrace_testing.engines.fake_engine import greedy, logits_for

LOOP = [5, 9, 2, 5, 9, 2, 5]
OTHER = [44, 17, 3, 60]
FEW = (2, 5, 9)
BIASED = Sampling(bias=tuple((id_, 100.0) for id_ in FEW))
"""Few tokens make the text repeat, so n-grams have drafts."""


def among_few(ids: list[int], count: int) -> list[int]:
    """The tokens that the model yields after `ids` if only `FEW` are allowed."""
    sequence = list(ids)
    for _ in range(count):
        logits = logits_for(sequence)
        sequence.append(max(FEW, key=lambda id_: float(logits[id_])))
    return sequence[len(ids) :]


@pytest.fixture(params=[False, True], ids=["inline", "overlap"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    driver = Driver(overlap=request.param, speculation=Speculation(max_draft_tokens=3))
    driver.warm_up()
    driver.open()
    yield driver
    driver.engine.close()


def multi_token(*slots: int, positions: int = 4, drafts: int = 3) -> Forward:
    return Forward(
        decode_slots=ints(slots),
        decode_tokens=ints([positions] * len(slots)),
        draft_tokens=ints([drafts] * len(slots)),
    )


def test_rejected_drafts_are_forgotten(driver: Driver) -> None:
    """The KV they left behind is written over, and their tokens are not part of what follows."""
    driver.run(forward(driver.admit(0, LOOP, room=24, parameters=BIASED), chunks=[(0, len(LOOP))]))
    found, drafted = [], 0
    for _ in range(6):
        result = driver.run(multi_token(0))
        found += result.ids.tolist()
        drafted += int(result.drafted_tokens.sum())
        assert result.computed_positions.tolist() == [len(LOOP) + len(found)]
    assert found == among_few(LOOP, 1 + len(found))[1:]
    assert drafted > len(found) - 6 > 0


def test_steps_with_drafts_are_sent_ahead(driver: Driver) -> None:
    admitted = driver.admit(0, LOOP, room=24, parameters=BIASED), driver.admit(3, room=24)
    steps = [driver.send(forward(*admitted, chunks=[(0, len(LOOP)), (3, len(PROMPT))]))]
    steps += [driver.send(multi_token(0, 3)) for _ in range(4)]
    found: dict[int, list[int]] = {0: [], 3: []}
    for step in steps:
        outcome = step.result(30).outcome
        assert isinstance(outcome, StepResult)
        ids = iter(outcome.ids.tolist())
        for slot, count in zip(outcome.slots.tolist(), outcome.counts.tolist(), strict=True):
            found[slot] += [next(ids) for _ in range(count)]
    assert found[0] == among_few(LOOP, len(found[0]))
    assert found[3] == greedy(PROMPT, len(found[3]))


def test_a_draft_that_is_not_finite_fails_its_row_alone(driver: Driver) -> None:
    first = driver.run(
        forward(
            driver.admit(0, LOOP, room=24, parameters=BIASED),
            driver.admit(1, OTHER, room=24),
            chunks=[(0, len(LOOP)), (1, len(OTHER))],
        )
    )
    driver.model.poison = int(first.ids[0])
    result = driver.run(multi_token(0, 1))
    assert result.failed_slots.tolist() == [0]
    assert result.slots.tolist() == [1]
    driver.model.poison = None
    again = driver.run(multi_token(0, 1))
    assert again.failed_slots.tolist() == [0]
    assert again.slots.tolist() == [1]


def test_a_failed_step_leaves_nothing_of_its_drafts(driver: Driver) -> None:
    driver.run(forward(driver.admit(0, LOOP, room=24, parameters=BIASED), chunks=[(0, len(LOOP))]))

    def explode(_: object) -> None:
        raise ValueError("boom")

    driver.model.before_forward = explode
    driver.fail(multi_token(0))
    driver.model.before_forward = lambda _: None
    driver.open()
    driver.free = list(range(1, 64))
    ids = driver.run(
        forward(driver.admit(0, PROMPT, room=24), chunks=[(0, len(PROMPT))])
    ).ids.tolist()
    for _ in range(3):
        ids += driver.run(multi_token(0)).ids.tolist()
    assert ids == greedy(PROMPT, len(ids))


def test_ranks_answer_with_one_checksum_for_one_outcome(driver: Driver) -> None:
    checksums = []
    for _ in range(2):
        driver.open()
        driver.free = list(range(1, 64))
        driver.run(
            forward(driver.admit(0, LOOP, room=24, parameters=BIASED), chunks=[(0, len(LOOP))])
        )
        checksums.append([driver.run(multi_token(0)).checksum for _ in range(3)])
    assert checksums[0] == checksums[1]
    assert len(set(checksums[0])) > 1
