"""Pictures through the whole server, judged by transformers' processor and model."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from tests.package.programs import run
from tokenizers import AddedToken, Tokenizer
from transformers import Idefics3Processor, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from millrace import AsyncLLM, SamplingParams
from millrace_launcher.demo import demo_folder
from millrace_testing.launcher.e2e import END_SECONDS, Server, launch
from millrace_testing.models.vision_models import PROCESSOR, save_tiny_vision

TILE, ROWS_PER_TILE, VOCAB_SIZE, NUM_TOKENS = 24, 9, 2112, 24
SPECIAL = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }}:"
    "{% if turn.content is string %}{{ turn.content }}{% else %}{% for part in turn.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
SIZES = ((48, 48), (96, 40), (20, 31))


@dataclass(frozen=True)
class Judge:
    """transformers' model, and its processor over the same tokenizer."""

    model: PreTrainedModel
    processor: Idefics3Processor

    def answer(self, prompt: str, images: list[Image.Image]) -> tuple[int, str]:
        """The number of prompt tokens and the greedy answer."""
        inputs = self.processor(
            text=prompt, images=images, return_tensors="pt", add_special_tokens=False
        )
        with torch.no_grad():
            ids = self.model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
        count = inputs["input_ids"].shape[1]
        text: str = self.processor.tokenizer.decode(ids[0][count:], skip_special_tokens=True)
        return count, text


def write_model(folder: Path) -> Judge:
    """A random Idefics 3 with the demo model's tokens, and the tokens of pictures."""
    tokens = Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))
    tokens.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in SPECIAL]
    )
    tokens.save(str(folder / "tokenizer.json"))
    settings = json.loads((demo_folder() / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    image_token_id = tokens.token_to_id("<image>")
    assert image_token_id is not None
    text = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 1024, "eos_token_id": 1}
    model = save_tiny_vision(folder, "idefics3", text=text, image_token_id=image_token_id)
    processor = {
        **PROCESSOR,
        "size": {"longest_edge": 4 * TILE},
        "max_image_size": {"longest_edge": TILE},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    fast = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    pictures = Idefics3ImageProcessorPil(**processor)
    return Judge(model, Idefics3Processor(pictures, fast, image_seq_len=ROWS_PER_TILE))


class Seeing(NamedTuple):
    folder: Path
    server: Server
    judge: Judge


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder: Path = tmp_path_factory.mktemp("seeing")
    judge = write_model(folder)
    flags = (f"--model-id={folder}", "--dtype=float32", "--deterministic=on", "--max-restarts=1000")
    with launch(*flags) as server:
        yield Seeing(folder, server, judge)


def picture(number: int) -> Image.Image:
    width, height = SIZES[number % len(SIZES)]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def url_of(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def chat(images: list[Image.Image], text: str = "what is it?") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url_of(image)}} for image in images]
    content = [{"type": "text", "text": "see "}, *parts, {"type": "text", "text": text}]
    return {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
    }


def rendered(count: int, text: str = "what is it?") -> str:
    return f"user:see {'<image>' * count}{text}<end_of_utterance>\nassistant:"


def post(server: Server, route: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{server.url}{route}", json=body, timeout=END_SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("numbers", [[0], [1], [2], [0, 2]], ids=str)
def test_chats_with_pictures_are_those_of_transformers(seeing: Seeing, numbers: list[int]) -> None:
    images = [picture(number) for number in numbers]
    count, text = seeing.judge.answer(rendered(len(images)), images)
    answer = post(seeing.server, "/v1/chat/completions", chat(images))
    assert answer["usage"]["prompt_tokens"] == count
    assert answer["choices"][0]["message"]["content"].strip() == text.strip()


def test_every_dialect_sees_the_same_picture(seeing: Seeing) -> None:
    server = seeing.server
    image = picture(1)
    url = url_of(image)
    expected = post(server, "/v1/chat/completions", chat([image]))["choices"][0]["message"][
        "content"
    ]
    responses = {
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "see "},
                    {"type": "input_image", "image_url": url},
                    {"type": "input_text", "text": "what is it?"},
                ],
            }
        ],
        "temperature": 0,
        "max_output_tokens": NUM_TOKENS,
    }
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    messages = {
        "model": "m",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "see "},
                    {"type": "image", "source": source},
                    {"type": "text", "text": "what is it?"},
                ],
            }
        ],
    }
    answer = post(server, "/v1/responses", responses)
    assert answer["output"][0]["content"][0]["text"] == expected
    assert post(server, "/v1/messages", messages)["content"][0]["text"] == expected
    prompt = rendered(1).replace("<image>", f"![]({url})").replace("<end_of_utterance>", "")
    raw = post(server, "/generate", {"inputs": prompt, "parameters": {"max_new_tokens": 4}})
    assert raw["generated_text"]


def test_a_picture_that_was_seen_is_not_encoded_again(seeing: Seeing) -> None:
    server = seeing.server
    image = picture(7)

    def encoded(text: str) -> float:
        before = server.metrics().get("millrace_image_tiles_encoded_total", 0.0)
        post(server, "/v1/chat/completions", chat([image], text))
        return server.metrics()["millrace_image_tiles_encoded_total"] - before

    assert encoded("what is it?") > 0
    assert encoded("and this?") == 0


@pytest.mark.long
async def test_the_library_and_batches_see_the_same_picture(seeing: Seeing, tmp_path: Path) -> None:
    server, image = seeing.server, picture(1)
    body = chat([image])
    expected = post(server, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
    image.save(tmp_path / "it.png")
    text = {"type": "text", "text": "see "}, {"type": "text", "text": "what is it?"}
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    async with (
        AsyncLLM(str(seeing.folder), dtype="float32", deterministic="on") as own,
        AsyncLLM(server.url) as remote,
    ):
        for llm in (own, remote):
            for one in (image, tmp_path / "it.png", (tmp_path / "it.png").read_bytes()):
                content = [text[0], {"type": "image", "image": one}, text[1]]
                answer = await llm.chat([{"role": "user", "content": content}], greedy)
                assert answer.text == expected
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"custom_id": "a", "url": "/v1/chat/completions", "body": body}]
    parts = [
        {"type": "input_image", "image_url": url_of(image)},
        {"type": "input_text", "text": "what?"},
    ]
    responses = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 4}
    lines.append({"custom_id": "b", "url": "/v1/responses", "body": responses})
    source.write_text("\n".join(json.dumps({"method": "POST", **line}) for line in lines))
    status, _, err = await run("run-batch", str(source), str(out), "--url", server.url)
    assert status == 0, err
    answers = {line["custom_id"]: line for line in map(json.loads, out.read_text().splitlines())}
    chats = answers["a"]["response"]["body"]["choices"]
    assert chats[0]["message"]["content"] == expected
    assert answers["b"]["response"]["body"]["output"][0]["content"][0]["text"]


class Streams:
    """Chats with pictures that are streamed together, and how many events of them have arrived."""

    def __init__(self, url: str, first: int) -> None:
        self.url = f"{url}/v1/chat/completions"
        self.num_events = 0
        self.bodies = [chat([picture(first + number)], f"number {number}?") for number in range(6)]
        for number, body in enumerate(self.bodies):
            body |= {"max_tokens": 80, "temperature": 1.0, "seed": number, "stream": True}

    def send(self, *, together: bool) -> Coroutine[Any, Any, list[str]]:
        """The texts of all answers; their events are counted from now on."""
        self.num_events = 0
        return self._texts(together=together)

    async def _texts(self, *, together: bool) -> list[str]:
        async with httpx.AsyncClient(timeout=END_SECONDS) as client:
            if together:
                return await asyncio.gather(*(self._text(client, body) for body in self.bodies))
            return [await self._text(client, body) for body in self.bodies]

    async def _text(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        text = ""
        async with client.stream("POST", self.url, json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    text += "".join(each["delta"].get("content") or "" for each in event["choices"])
                    self.num_events += 1
        return text


@pytest.mark.long
async def test_kills_change_no_token_of_answers_with_pictures(seeing: Seeing) -> None:
    server, streams = seeing.server, Streams(seeing.server.url, first=20)
    alone = await streams.send(together=False)
    middle = streams.num_events // 2
    assert len(set(alone)) == len(alone)
    assert await streams.send(together=True) == alone
    send = partial(streams.send, together=True)
    for _ in range(2):
        task, shard = await server.caught(
            send, is_time=lambda: streams.num_events > middle, num_running=1
        )
        psutil.Process.kill(shard)
        assert await task == alone


async def test_a_kill_between_tiles_loses_no_picture(seeing: Seeing) -> None:
    server, streams = seeing.server, Streams(seeing.server.url, first=40)
    before = server.metrics()["millrace_image_tiles_encoded_total"]
    task = asyncio.create_task(streams.send(together=True))
    while server.metrics()["millrace_image_tiles_encoded_total"] == before:
        await asyncio.sleep(0)
    psutil.Process.kill(server.shard)
    texts = await task
    assert await streams.send(together=False) == texts
