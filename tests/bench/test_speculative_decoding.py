"""The benchmark of speculative decoding: its texts, its figures of rounds, and its comparison of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import pytest
from bench.harness.server import RunningServer
from bench.speculative_decoding import measure
from bench.speculative_decoding.measure import (
    ACCEPTED,
    DRAFTED,
    STEPS,
    TOKENS,
    AnswersDifferError,
    Load,
    Round,
    Row,
    bodies,
    run_load,
)


def a_round(rate: float, *, cores: float = 0.0, **metrics: float) -> Round:
    names = {"tokens": TOKENS, "steps": STEPS, "drafted": DRAFTED, "accepted": ACCEPTED}
    return Round([], rate, {names[key]: value for key, value in metrics.items()}, cores)


def a_row(plain: Sequence[float], speculative: Sequence[float], name: str = "plain") -> Row:
    counts = {"tokens": 150.0, "steps": 100.0, "drafted": 200.0, "accepted": 120.0}
    return Row(
        Load(name, 8),
        [a_round(rate) for rate in plain],
        [a_round(r, **counts) for r in speculative],
    )


def test_a_row_compares_rounds_that_had_the_same_requests() -> None:
    row = a_row([100, 200, 50], [150, 180, 100])
    assert row.speedup == 1.5
    assert (row.tokens_per_step, row.drafted, row.accepted) == (2.5, 2.0, 0.6)


def test_repetitive_prompts_hold_the_answer_and_plain_ones_only_the_question() -> None:
    plain, repetitive = (
        [str(body["inputs"]) for body in bodies(kind, count=20, seed="a")]
        for kind in ("plain", "repetitive")
    )
    assert all(prompt.count("\n") == 1 for prompt in plain)
    for prompt in repetitive:
        question, _ = prompt.split("\n", 1)
        assert prompt.endswith(f"\n{question}\n")
        assert prompt.count("\n") == 9
    assert bodies("plain", count=20, seed="a") == bodies("plain", count=20, seed="a")
    assert bodies("plain", count=20, seed="a") != bodies("plain", count=20, seed="b")


class FakeServer:
    """Answers with its name and counts, as a server with draft tokens would."""

    def __init__(self, url: str) -> None:
        self.url = url

    def processes(self) -> list[object]:
        return []


def test_an_answer_that_draft_tokens_changed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounds_of(texts: Mapping[str, str]) -> None:
        async def run_round(server: RunningServer, requests: object, _: int) -> Round:
            assert requests
            metrics = dict.fromkeys((TOKENS, STEPS, DRAFTED, ACCEPTED), 1.0)
            return Round([texts[server.url]], 10.0, metrics, 0.0)

        monkeypatch.setattr(measure, "run_round", run_round)

    off, on = (cast("RunningServer", FakeServer(url)) for url in ("off", "on"))
    rounds_of({"off": "same", "on": "same"})
    row = run_load(off, on, Load("plain", 1), rounds=3, requests_per_stream=1)
    assert (len(row.plain), len(row.speculative), row.speedup) == (3, 3, 1.0)
    rounds_of({"off": "one", "on": "another"})
    with pytest.raises(AnswersDifferError, match="plain, 1 at once"):
        run_load(off, on, Load("plain", 1), rounds=3, requests_per_stream=1)
