"""The command line, and what becomes of a peer that fails."""

from __future__ import annotations

import pytest
from bench.__main__ import parse_arguments
from bench.comparison.plan import Attempt, installed
from bench.peers.engines import OURS
from bench.peers.process import EngineError

from millrace.load.apis import LLAMA, TGI, VLLM, BadStreamError, Dialect
from millrace.load.levels import closed


def test_levels_alone_mean_servers_alone() -> None:
    assert parse_arguments([]).only == ["offline", "served"]
    assert parse_arguments(["--levels", "c1:128+64"]).only == ["served"]
    both = ["--levels", "c1:128+64", "--only", "offline", "served"]
    assert parse_arguments(both).only == ["offline", "served"]


def test_ours_is_always_there_and_the_unknown_never() -> None:
    assert installed([OURS, "no-such-peer"]) == [OURS]


def test_a_peers_failure_is_a_note_and_ours_an_error() -> None:
    notes: list[str] = []
    with Attempt("vllm", notes) as attempt:
        raise EngineError("vllm ended with 1:\nTraceback\nNo memory")
    assert attempt.failed
    assert notes == ["vllm took no further part: vllm ended with 1: No memory"]
    with pytest.raises(EngineError), Attempt(OURS, notes):
        raise EngineError("gone")
    with pytest.raises(KeyError), Attempt("vllm", notes):
        raise KeyError("a defect of the benchmark")
    assert len(notes) == 1


LEVEL = closed(1, 4, 7)


@pytest.mark.parametrize("dialect", [TGI, VLLM, LLAMA])
def test_every_dialect_asks_for_the_length_and_no_early_end(dialect: Dialect) -> None:
    body = dialect.body("a prompt", LEVEL)
    flat = {**body, **body.get("parameters", {})}
    assert 7 in (flat.get("max_new_tokens"), flat.get("max_tokens"), flat.get("n_predict"))
    assert flat["ignore_eos"] is True
    assert "a prompt" in flat.values()


def test_tokens_of_an_event_are_counted_by_what_it_holds() -> None:
    vllm = {"choices": [{"token_ids": [5, 6], "text": "x", "finish_reason": "length"}]}
    assert VLLM.num_tokens(vllm, 0) == 2
    assert LLAMA.num_tokens({"tokens": [1]}, 3) == 1
    assert TGI.num_tokens({"index": 4}, 3) == 1
    VLLM.check_end(vllm, 2)
    LLAMA.check_end({"stop": True, "tokens_predicted": 4}, 4)


@pytest.mark.parametrize(
    ("dialect", "last"),
    [
        (VLLM, {}),
        (VLLM, {"choices": [{"token_ids": [5], "finish_reason": None}]}),
        (LLAMA, {"stop": False, "tokens": [1]}),
        (LLAMA, {"stop": True, "tokens_predicted": 3}),
        (TGI, {"index": 4}),
    ],
)
def test_a_stream_without_its_end_is_no_stream(dialect: Dialect, last: dict[str, object]) -> None:
    with pytest.raises(BadStreamError):
        dialect.check_end(last, 4)
