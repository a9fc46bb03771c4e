"""The Python API: a model in this process or behind a URL, its parameters and its pooling."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.package.programs import PATHS, OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from millrace import LLM, AsyncLLM, ConnectionFailed, RequestError, SamplingParams, StartError
from millrace.images import with_image_urls
from millrace.llm.async_llm import RequestSlots
from millrace.llm.deployment import arguments_of, settings_of
from millrace.llm.local import Local
from millrace_launcher.demo import demo_folder
from millrace_proto.version import VERSION
from millrace_router.api.openai.request import CompletionRequest
from millrace_testing.models.pooling_models import embeddings, save_reranker, scores
from millrace_testing.router.sse import served_application

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


def test_parts_of_transformers_become_those_of_openai(tmp_path: Path) -> None:
    file = io.BytesIO()
    image = Image.new("RGB", (2, 3), "red")
    image.save(file, "PNG")
    (tmp_path / "a.png").write_bytes(file.getvalue())
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    text = {"type": "text", "text": "what?"}
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": image},
        {"type": "image", "image": file.getvalue()},
        {"type": "image", "path": tmp_path / "a.png"},
        {"type": "image", "image": str(tmp_path / "a.png")},
        {"type": "image", "url": url},
    ]
    (message,) = with_image_urls([{"role": "user", "content": [*parts, text]}])
    assert message["content"] == [{"type": "image_url", "image_url": {"url": url}}] * 5 + [text]
    plain = {"role": "user", "content": "a"}
    assert with_image_urls([plain]) == [plain]
    for wrong, error in (({"image": 3}, TypeError), ({}, ValueError), ({"path": "no"}, OSError)):
        with pytest.raises(error):
            with_image_urls([{"role": "user", "content": [{"type": "image", **wrong}]}])


def test_a_model_of_text_refuses_an_image(llm: LLM) -> None:
    parts = [{"type": "image", "image": Image.new("RGB", (2, 3))}]
    with (
        pytest.warns(UserWarning, match="image_url"),
        pytest.raises(RequestError, match="reads only text"),
    ):
        llm.chat([{"role": "user", "content": parts}], GREEDY)


def test_a_stop_string_is_cut(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, stop="attention")
    answer = llm.chat(MESSAGES, params)
    assert (answer.text, answer.finish_reason) == ("The KV cache keeps the ", "stop")


def test_the_stop_string_is_part_of_the_text_only_on_request(llm: LLM) -> None:
    (cut,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, stop="a"))
    with_stop = SamplingParams(
        temperature=0, max_tokens=24, stop="a", extra={"include_stop_str_in_output": True}
    )
    (whole,) = llm.generate(PROMPTS[0], with_stop)
    assert cut.outputs[0].finish_reason == "stop"
    assert whole.text == cut.text + "a"


def test_chats_accept_further_fields_of_the_body(llm: LLM) -> None:
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


def test_fields_that_change_the_answer_are_refused_and_unknown_ones_reported(llm: LLM) -> None:
    with pytest.raises(RequestError, match="`n_predict` is not supported"):
        llm.generate("A", SamplingParams(max_tokens=1, extra={"n_predict": 5}))
    with pytest.warns(UserWarning, match="without effect: made_up"):
        llm.generate("A", SamplingParams(max_tokens=1, extra={"made_up": 5}))


def test_a_killed_shard_loses_no_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    (expected,) = llm.generate("A", params)
    stream = llm.stream("A", params)
    pieces = list(islice(stream, 3))
    (shard,) = shards()
    shard.send_signal(signal.SIGKILL)
    pieces += stream
    ids = tuple(each for piece in pieces for each in piece.token_ids or ())
    assert ids == expected.outputs[0].token_ids


async def test_the_asynchronous_form_answers_and_ends_its_shard() -> None:
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


REMOTE_MESSAGES = [{"role": "user", "content": "One?"}]


async def completions(request: web.Request) -> web.StreamResponse:
    """Two choices of two words; their ids are known for the first prompt."""
    body = await request.json()
    response = web.StreamResponse()
    await response.prepare(request)
    for number, word in enumerate(("re ", str(body["prompt"]))):
        for index in range(body["n"]):
            choice = {"index": index, "text": word, "token_ids": [number], "finish_reason": None}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def test_completions_are_answered_and_streamed() -> None:
    application = OpenAI(lambda body: "").application()
    application.router.add_post("/v1/completions", completions)
    async with served_application(application) as url, AsyncLLM(f"{url}/v1") as llm:
        first, second = await llm.generate(["a", [4, 5]], SamplingParams(n=2))
        pieces = [piece async for piece in llm.stream("b")]
    assert [each.text for each in first.outputs] == ["re a", "re a"]
    assert first.outputs[1].token_ids == (0, 1)
    assert first.outputs[0].logprobs is None
    assert (second.prompt, second.text) == ((4, 5), "re [4, 5]")
    assert [piece.text for piece in pieces] == ["re ", "b"]


async def test_a_chat_streams_and_names_the_servers_model() -> None:
    server = OpenAI(lambda body: "one two")
    async with served_application(server.application()) as url, AsyncLLM(url, api_key="k") as llm:
        stream = llm.chat_stream(REMOTE_MESSAGES, SamplingParams(max_tokens=3), tools=[])
        pieces = [piece async for piece in stream]
    assert "".join(piece.text for piece in pieces) == "one two"
    assert pieces[-1].finish_reason == "stop"
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"], body["tools"]) == ("the-model", 3, [])
    assert server.keys == ["Bearer k"]


async def test_errors_are_typed() -> None:
    server = OpenAI(lambda body: "refuse")
    async with served_application(server.application()) as url, AsyncLLM(url) as llm:
        with pytest.raises(RequestError, match="no such thing"):
            await llm.chats([REMOTE_MESSAGES, REMOTE_MESSAGES])
    with pytest.raises(ConnectionFailed):
        await AsyncLLM("http://127.0.0.1:9").start()
    with pytest.raises(RuntimeError, match="not loaded"):
        await llm.chat(REMOTE_MESSAGES)


async def test_a_remote_server_can_be_used_without_an_event_loop() -> None:
    server = OpenAI(lambda body: "one two")

    def use(url: str) -> list[str]:
        with LLM(url) as llm:
            texts = [piece.text for piece in llm.chat_stream(REMOTE_MESSAGES)]
            stream = llm.chat_stream(REMOTE_MESSAGES)
            next(stream)
            stream.close()
        llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            llm.chat(REMOTE_MESSAGES)
        return texts

    async with served_application(server.application()) as url:
        assert await asyncio.to_thread(use, url) == ["one", " two", ""]
    with pytest.raises(ConnectionFailed):
        await asyncio.to_thread(use, "http://127.0.0.1:9")


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 5), st.lists(st.integers(1, 8), min_size=1, max_size=12))
def test_all_requests_get_their_slots_and_return_them(
    data: st.DataObject, count: int, wanted: list[int]
) -> None:
    leaves = data.draw(st.sets(st.integers(0, len(wanted) - 1)))
    order: list[int] = []
    most: list[int] = []

    async def run() -> None:
        places, used = RequestSlots(count), 0

        async def work(number: int, size: int) -> None:
            nonlocal used
            async with places.taken(size):
                order.append(number)
                used += min(size, count)
                most.append(used)
                try:
                    await asyncio.sleep(0)
                finally:
                    used -= min(size, count)

        tasks = [asyncio.create_task(work(number, size)) for number, size in enumerate(wanted)]
        await asyncio.sleep(0)
        for number in leaves:
            tasks[number].cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks, return_exceptions=True)
            async with places.taken(count):
                pass
        for number, task in enumerate(tasks):
            if not task.cancelled():
                task.result()
                assert number in order

    asyncio.run(run())
    assert order == sorted(order)
    assert max(most, default=0) <= count


async def test_slots_of_a_cancelled_request_go_to_the_next_one() -> None:
    places, got = RequestSlots(1), []

    async def work(number: int) -> None:
        async with places.taken(1):
            got.append(number)

    async with places.taken(1):
        first, second = (asyncio.create_task(work(number)) for number in (1, 2))
        await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert got == [2]


def test_the_body_has_only_parameters_that_are_set() -> None:
    assert SamplingParams().body() == {"n": 1}
    params = SamplingParams(temperature=0, stop=("a", "b"), extra={"logit_bias": {"5": 1.0}})
    assert params.body() == {
        "n": 1,
        "temperature": 0,
        "stop": ["a", "b"],
        "logit_bias": {"5": 1.0},
    }


def test_the_server_knows_every_parameter() -> None:
    names = set(SamplingParams.__dataclass_fields__) - {"extra"}
    assert names <= set(CompletionRequest.model_fields)


def test_keywords_are_flags() -> None:
    given = {"max_total_tokens": 64, "enable_lora": True, "revision": None, "deterministic": "on"}
    assert arguments_of("m", {**given, "lora_adapters": ["a=b", "c=d"], "strict_tgi": False}) == [
        *("--model-id=m", "--max-total-tokens=64", "--enable-lora", "--deterministic=on"),
        *("--lora-adapters=a=b", "--lora-adapters=c=d"),
    ]
    settings = settings_of("m", {"max_total_tokens": 64})
    assert settings.router.max_total_tokens == 64


@pytest.mark.parametrize(
    ("flags", "reason"),
    [({"max_totl_tokens": 1}, "--max-total-tokens"), ({"port": "x"}, "invalid value 'x'")],
)
def test_a_wrong_flag_is_an_error(
    flags: dict[str, object], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StartError, match=reason):
        settings_of(None, flags)
    assert capsys.readouterr().err == ""


TEXTS = ["What is a shard?", "a", "A router owns requests. " * 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reranker")
    save_reranker(path)
    return path


@pytest.fixture(scope="module")
def pooling_llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), task="embed,score", device="cpu", dtype="float32") as llm:
        yield llm


def test_embeddings_are_those_of_transformers(pooling_llm: LLM, folder: Path) -> None:
    found = torch.tensor(pooling_llm.embed(TEXTS, normalize=True))
    torch.testing.assert_close(found, embeddings(folder, TEXTS), atol=1e-4, rtol=0)
    (short,) = pooling_llm.embed(TEXTS[0], dimensions=8, normalize=True)
    torch.testing.assert_close(
        torch.tensor([short]), embeddings(folder, TEXTS[:1], dimensions=8), atol=1e-4, rtol=0
    )


def test_scores_match_transformers(pooling_llm: LLM, folder: Path) -> None:
    expected = scores(folder, TEXTS[0], TEXTS[1:])
    assert pooling_llm.score(TEXTS[0], TEXTS[1:]) == pytest.approx(expected, abs=1e-4)
    assert pooling_llm.score(TEXTS[:1], TEXTS[1]) == pytest.approx(expected[:1], abs=1e-4)


def test_invalid_pooling_requests_are_refused(pooling_llm: LLM) -> None:
    with pytest.raises(RequestError, match="`dimensions` must be <="):
        pooling_llm.embed("a", dimensions=10_000)
    with pytest.raises(RequestError, match="`text_1` must have one text"):
        pooling_llm.score(["a", "b"], ["a", "b", "c"])
    with pytest.raises(RequestError, match="cannot be empty"):
        pooling_llm.embed(["a", ""])
    with pytest.raises(RequestError, match="generate"):
        pooling_llm.generate("a")


async def test_a_remote_server_embeds_and_scores() -> None:
    bodies: list[Any] = []

    def answering(field: str, values: list[Any]) -> Any:
        async def answer(request: web.Request) -> web.Response:
            bodies.append(await request.json())
            data = [{"index": index, field: value} for index, value in enumerate(values)]
            return web.json_response({"data": data[::-1]})

        return answer

    application = OpenAI(lambda body: "").application()
    application.router.add_post("/v1/embeddings", answering("embedding", [[0.0, 1.0], [1.0, 0.0]]))
    application.router.add_post("/v1/score", answering("score", [0.25, 0.5]))
    async with served_application(application) as url, AsyncLLM(url) as llm:
        assert await llm.embed(["a", (4, 5)], dimensions=2) == [[0.0, 1.0], [1.0, 0.0]]
        assert await llm.score("a", ["b", "c"]) == [0.25, 0.5]
    asked, scored = bodies
    assert asked["input"] == ["a", [4, 5]]
    assert (asked["model"], asked["dimensions"]) == ("the-model", 2)
    assert (scored["text_1"], scored["text_2"]) == ("a", ["b", "c"])
