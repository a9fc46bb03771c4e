"""The cases of a verification: flags, prompts, adapters, and faults that happen once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from millrace.verify.__main__ import main
from millrace.verify.adapter_files import linears, write_adapters
from millrace.verify.answers import StreamError, as_float32, completion_from
from millrace.verify.cases import (
    MOST_ROUNDS,
    After,
    ServerUnderTest,
    crowd,
    speculated,
)
from millrace.verify.client import Client
from millrace.verify.comparison import Verdict
from millrace.verify.questions import Question
from millrace.verify.suite import ServerInfo, Suite
from millrace_launcher.demo import demo_folder
from millrace_testing.launcher.verify import BLOCK, FakeServer, fake_server

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
def test_an_unfinished_stream_keeps_its_tokens_and_has_a_reason(
    end: list[dict[str, Any]], words: str
) -> None:
    found = completion_from([ECHO, FIRST, *end])
    assert found.ids == ("c",)
    assert found.error == words


NAMES = ("one", "other")


def check(
    fake: FakeServer, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, dict[str, Any]]:
    code = main([fake.url, "--json", "--cases=adapters", *flags])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    return code, row


def test_adapters_that_keep_the_promise_are_green(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(adapters=NAMES) as fake:
        code, row = check(fake, capsys)
    assert (code, row["verdict"], row["requests"]) == (0, "equal", 12)
    assert row["note"] == "adapters changed 8 answers of the base"


def test_an_adapter_that_is_lost_in_a_batch_is_detected(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(adapters=NAMES, repeats_lose_adapters=True) as fake:
        code, row = check(fake, capsys)
    assert (code, row["verdict"], row["requests_equal"]) == (1, "broken", 4)


def test_an_adapter_without_effect_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(adapters=NAMES, ignores_adapters=True) as fake:
        code, row = check(fake, capsys)
    assert (code, row["verdict"]) == (1, "not_exercised")


def test_the_files_fit_the_demo_model(tmp_path: Path) -> None:
    shapes = linears(demo_folder())
    assert shapes["model.layers.3.mlp.down_proj"] == (256, 704)
    assert len(shapes) == 4 * 7
    folders = write_adapters(demo_folder(), tmp_path)
    wide, narrow = (
        load_file(str(folder / "adapter_model.safetensors")) for folder in folders.values()
    )
    assert (len(wide), len(narrow)) == (2 * 4 * 7, 2 * 4 * 2)
    a = wide["base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"]
    assert (a.dtype, tuple(a.shape)) == (torch.bfloat16, (8, 256))
    assert 2**-5 <= a.abs().min() <= a.abs().max() < 2**-3
    assert 0.4 < (a > 0).float().mean() < 0.6
    config = json.loads((folders["verify-narrow"] / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (20, ["q_proj", "v_proj"])
