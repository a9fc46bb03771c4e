"""The shipped model that reads pictures: it reads texts that it was not trained with, in company and after kills."""

from __future__ import annotations

import asyncio
import base64
import io
import random
from collections.abc import Iterator, Sequence

import httpx
import psutil
import pytest
from demo.pictures import Picture, num_wrong, random_picture
from demo.train_reader import READER

from millrace_testing.launcher.e2e import END_SECONDS, Server, launch

NUM_PICTURES = 120
SHARE_RIGHT = 0.95
LARGEST_FOLDER = 5_000_000
TILES = "millrace_image_tiles_encoded_total"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with launch(f"--model-id={READER}", "--max-restarts=1000") as server:
        yield server


@pytest.fixture(scope="module")
def shown() -> list[Picture]:
    rng = random.Random(5)
    return [random_picture(rng, is_for_tests=True) for _ in range(NUM_PICTURES)]


def content_of(picture: Picture) -> bytes:
    file = io.BytesIO()
    picture.image.save(file, "PNG")
    return file.getvalue()


class Reading:
    """Asks for the texts of pictures."""

    def __init__(self, url: str, shown: Sequence[Picture]) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._bodies = [_body(picture) for picture in shown]

    async def texts(self, *, together: bool) -> list[str]:
        async with httpx.AsyncClient(timeout=END_SECONDS) as client:
            if together:
                return await asyncio.gather(*(self._text(client, body) for body in self._bodies))
            return [await self._text(client, body) for body in self._bodies]

    async def _text(self, client: httpx.AsyncClient, body: dict[str, object]) -> str:
        answer = await client.post(self._url, json=body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text


def _body(picture: Picture) -> dict[str, object]:
    url = f"data:image/png;base64,{base64.b64encode(content_of(picture)).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Read it."}]
    return {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 9}


def test_the_model_is_small() -> None:
    assert sum(path.stat().st_size for path in READER.iterdir()) <= LARGEST_FOLDER


async def test_texts_that_were_never_shown_are_read_in_company_and_after_a_kill(
    server: Server, shown: list[Picture]
) -> None:
    half = NUM_PICTURES // 2
    reading, killed = Reading(server.url, shown[:half]), Reading(server.url, shown[half:])
    together = await reading.texts(together=True)
    before = server.metrics()[TILES]
    task = asyncio.create_task(killed.texts(together=True))
    while server.metrics()[TILES] < before + half // 4:
        await asyncio.sleep(0)
    psutil.Process.kill(server.shard)
    texts = together + await task
    wrong = sum(num_wrong(text, picture.text) for text, picture in zip(texts, shown, strict=True))
    share = 1 - wrong / sum(len(picture.text) for picture in shown)
    assert share >= SHARE_RIGHT, [
        (picture.text, text)
        for text, picture in zip(texts, shown, strict=True)
        if text != picture.text
    ]
    assert await killed.texts(together=True) == texts[half:]
    some = Reading(server.url, shown[:12])
    assert await some.texts(together=False) == together[:12]
