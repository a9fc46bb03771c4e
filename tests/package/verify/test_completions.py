"""Reading a text completion with an echoed prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from millrace.verify.answers import StreamError, as_float32, completion_from
from millrace.verify.questions import COMPLETIONS, Question


def chunk(
    text: str,
    tokens: list[tuple[str, float | None]],
    *,
    top: Sequence[Mapping[str, float | None] | None] | None = None,
    reason: str | None = None,
    counts: tuple[int, int] = (2, 2),
) -> dict[str, Any]:
    names, logprobs = [name for name, _ in tokens], [logprob for _, logprob in tokens]
    columns = {
        "tokens": names,
        "token_logprobs": logprobs,
        "top_logprobs": top or [dict(tokens)],
        "text_offset": [0] * len(tokens),
    }
    found = {
        "choices": [{"index": 0, "text": text, "logprobs": columns, "finish_reason": reason}],
    }
    if reason is None:
        return found
    usage = {
        "prompt_tokens": counts[0],
        "completion_tokens": counts[1],
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    return {**found, "usage": usage}


ECHO = chunk("ab", [("a", None), ("b", -0.1)], top=[None, {"c": -0.05, "b": -0.1}])
FIRST = chunk("c", [("c", -1.3242188)])
LAST = chunk("d", [("d", -0.5)], top=[{"e": -0.2, "d": -0.5}], reason="length")


def test_prompt_and_tokens_are_put_together_exactly() -> None:
    found = completion_from([ECHO, FIRST, LAST])
    assert (found.text, found.finish_reason, found.cached_tokens) == ("abcd", "length", 16)
    assert found.ids == ("c", "d")
    assert found.logprobs == (-1.32421875, -0.5), "float32s, not decimals"
    assert found.candidates[1] == (("e", as_float32(-0.2)), ("d", -0.5))
    assert found.prompt.ids == ("a", "b")
    assert math.isnan(found.prompt.logprobs[0])
    assert found.prompt.logprobs[1] == as_float32(-0.1)
    assert found.prompt.candidates == ((), (("c", as_float32(-0.05)), ("b", as_float32(-0.1))))


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([ECHO, LAST], id="a token is missing"),
        pytest.param([FIRST, LAST], id="no echo"),
        pytest.param([ECHO, FIRST, LAST, LAST], id="more after the end"),
        pytest.param([ECHO, {"choices": [{"text": "x", "logprobs": None}]}], id="not scored"),
        pytest.param([{"index": 1, "token": {}}], id="another route's"),
    ],
)
def test_a_stream_that_is_not_whole_is_refused(chunks: list[dict[str, Any]]) -> None:
    with pytest.raises(StreamError):
        completion_from(chunks)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ([], "the stream ended without its last chunk"),
        ([{"error": {"message": "it broke"}}], "it broke"),
    ],
    ids=["cut off", "error chunk"],
)
def test_an_unfinished_stream_keeps_its_tokens_and_says_why(
    end: list[dict[str, Any]], words: str
) -> None:
    found = completion_from([ECHO, FIRST, *end])
    assert found.ids == ("c",)
    assert found.error == words


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0.0, True), (1.0, False)])
def test_it_is_asked_in_openais_words(temperature: float, is_greedy: bool) -> None:
    question = Question(
        text="?",
        input_ids=(4, 5),
        max_new_tokens=3,
        parameters={"temperature": temperature},
        route=COMPLETIONS,
    )
    assert question.is_greedy is is_greedy
    assert question.seeded(7).body == {
        "prompt": (4, 5),
        "max_tokens": 3,
        "stream": True,
        "temperature": temperature,
        "seed": 7,
    }
