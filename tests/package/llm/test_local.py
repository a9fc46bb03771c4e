"""A model of this process: the demo model, against `transformers` and against a killed shard."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import psutil
import pytest
import torch
from tests.package.programs import PATHS
from transformers import AutoModelForCausalLM, AutoTokenizer

from millrace import LLM, AsyncLLM, RequestError, SamplingParams, StartError
from millrace.llm.local import Local
from millrace_launcher.demo import demo_folder
from millrace_proto.version import VERSION

MESSAGES = [{"role": "user", "content": "What is a KV cache?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = ["What is continuous", "The router", "A"]


def shards() -> list[psutil.Process]:
    """The shards of this process; what they start themselves ends with them."""
    return [child for child in running_children() if "millrace_shard" in " ".join(child.cmdline())]


def running_children() -> list[psutil.Process]:
    """Without those that have ended, which other tests may have left to be waited for."""
    children = psutil.Process().children()
    return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", dtype="float32", max_concurrent_requests=8) as llm:
        yield llm
        assert shards()
    assert shards() == []


def taken(llm: LLM) -> int:
    """Permits of running requests."""
    backend = llm._llm._backend
    assert isinstance(backend, Local)
    return backend._services.infer.permits.taken


def test_greedy_tokens_are_those_of_transformers(llm: LLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    model = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            expected = model.generate(**ids, max_new_tokens=24, do_sample=False)[0]
        new = tuple(expected[ids["input_ids"].shape[1] :].tolist())
        assert output.outputs[0].token_ids == new
        assert output.prompt == prompt
        assert output.text == tokenizer.decode(new, skip_special_tokens=True)


def test_more_prompts_than_requests_may_be_in_flight(llm: LLM) -> None:
    params = SamplingParams(seed=3, n=2, max_tokens=4, temperature=1.0)
    many = llm.generate(["A router"] * 20, params)
    assert len(many) == 20
    texts = {tuple(output.text for output in one.outputs) for one in many}
    assert len(texts) == 1
    assert len(texts.pop()) == 2
    assert taken(llm) == 0


def test_samples_that_the_body_asks_for_count_too(llm: LLM) -> None:
    answers = llm.chats([MESSAGES] * 4, SamplingParams(max_tokens=2), n=4)
    assert [len(answer.answer["choices"]) for answer in answers] == [4] * 4
    outputs = llm.generate(["A"] * 4, SamplingParams(max_tokens=2, extra={"n": 4}))
    assert [len(output.outputs) for output in outputs] == [4] * 4
    assert taken(llm) == 0


def test_calls_of_several_threads_share_the_requests(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0)
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(llm.generate, ["A"] * 8, params) for _ in range(4)]
        assert len({output.text for call in calls for output in call.result()}) == 1
    assert taken(llm) == 0


def test_token_ids_are_a_prompt(llm: LLM) -> None:
    ids = AutoTokenizer.from_pretrained(demo_folder())(PROMPTS[0])["input_ids"]
    (from_ids,) = llm.generate([ids], GREEDY)
    (from_text,) = llm.generate(PROMPTS[0], GREEDY)
    assert from_ids.outputs == from_text.outputs


def test_streams_are_whole_answers_in_pieces(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], GREEDY)
    pieces = list(llm.stream(PROMPTS[0], GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == whole.outputs[0].finish_reason
    chat = llm.chat(MESSAGES, GREEDY)
    assert "".join(piece.text for piece in llm.chat_stream(MESSAGES, GREEDY)) == chat.text
    assert chat.text.startswith("The KV cache keeps")
    assert chat.usage["completion_tokens"] == 24
    assert chat.finish_reason == "length"
    assert chat.answer["system_fingerprint"].startswith(VERSION)


def test_a_stop_string_is_cut(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, stop="attention")
    answer = llm.chat(MESSAGES, params)
    assert (answer.text, answer.finish_reason) == ("The KV cache keeps the ", "stop")


def test_what_is_part_of_the_text_is_the_callers_choice(llm: LLM) -> None:
    (cut,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, stop="a"))
    with_stop = SamplingParams(
        temperature=0, max_tokens=24, stop="a", extra={"include_stop_str_in_output": True}
    )
    (whole,) = llm.generate(PROMPTS[0], with_stop)
    assert cut.outputs[0].finish_reason == "stop"
    assert whole.text == cut.text + "a"


@pytest.mark.parametrize("field", [{"echo": True}, {"best_of": 2}, {"prompt_logprobs": 0}], ids=str)
def test_what_has_no_place_in_a_piece_is_refused(llm: LLM, field: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=f"`{next(iter(field))}` is not supported without"):
        llm.generate("A", SamplingParams(max_tokens=2, temperature=1.0, extra=field))
    assert taken(llm) == 0


def test_chats_and_fields_of_the_body(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    field = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answers = llm.chats([MESSAGES, MESSAGES], SamplingParams(seed=1), response_format=field)
    assert all(answer.text.lstrip().startswith("{") for answer in answers)


def test_a_closed_stream_frees_its_request(llm: LLM) -> None:
    stream = llm.stream("A", SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(list(islice(stream, 2))) == 2
    assert taken(llm) == 1
    stream.close()
    assert taken(llm) == 0


@pytest.mark.parametrize(
    ("params", "status", "reason"),
    [
        (SamplingParams(max_tokens=10**6), 422, "max_tokens"),
        (SamplingParams(temperature=-1.0), 422, "temperature"),
        (SamplingParams(extra={"frequency_penalty": 9.0}), 422, "frequency_penalty"),
    ],
)
def test_a_refusal_is_typed(llm: LLM, params: SamplingParams, status: int, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as refused:
        llm.generate("A", params)
    assert (refused.value.status, refused.value.kind) == (status, "validation")
    assert taken(llm) == 0


def test_a_field_that_would_change_the_answer_is_refused_and_an_unknown_one_told(llm: LLM) -> None:
    with pytest.raises(RequestError, match="`n_predict` is not supported"):
        llm.generate("A", SamplingParams(max_tokens=1, extra={"n_predict": 5}))
    with pytest.warns(UserWarning, match="without effect: made_up"):
        llm.generate("A", SamplingParams(max_tokens=1, extra={"made_up": 5}))


def test_a_killed_shard_costs_no_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    (expected,) = llm.generate("A", params)
    stream = llm.stream("A", params)
    pieces = list(islice(stream, 3))
    (shard,) = shards()
    shard.send_signal(signal.SIGKILL)
    pieces += stream
    ids = tuple(each for piece in pieces for each in piece.token_ids or ())
    assert ids == expected.outputs[0].token_ids


async def test_the_asynchronous_form_on_a_loop_of_its_own() -> None:
    before = shards()
    async with AsyncLLM(device="cpu", adapter_cache=None) as llm:
        chat, outputs = await asyncio.gather(llm.chat(MESSAGES, GREEDY), llm.generate("A", GREEDY))
        assert chat.text.startswith("The KV cache keeps")
        assert len(outputs) == 1
        assert len(shards()) == len(before) + 1
    assert shards() == before


def test_a_model_that_is_not_there_leaves_nothing(tmp_path: Path) -> None:
    before = running_children()
    with pytest.raises(StartError, match="does not exist"):
        LLM(str(tmp_path / "none"))
    assert running_children() == before


PROGRAM = """
from millrace import LLM
llm = LLM(device="cpu")
print(llm.chat([{"role": "user", "content": "What is a KV cache?"}], temperature=0).text)
"""


def test_a_program_that_closes_nothing_ends_in_order_and_has_its_stdout_for_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith("The KV cache keeps")
