"""Third-party clients, agents and the chat page with pictures, against a server of the model that reads them."""

from __future__ import annotations

import base64
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from bench.harness.server import RunningServer, serving
from demo.pictures import random_picture
from demo.train_reader import READER
from tests.ecosystem import prepare
from tests.ecosystem.running import run_cases
from tests.ecosystem.test_clients import MODULES, node_or_skip, python_or_skip
from tests.ecosystem.test_pages import PYTHON

pytestmark = pytest.mark.ecosystem

CLIENTS = prepare.CLIENTS
NUM_PICTURES = 4
SEED = 7


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A launcher with the model that reads pictures."""
    log = tmp_path_factory.mktemp("launcher") / "launcher.log"
    with serving(READER, log=log) as running:
        yield running


@pytest.fixture(scope="module")
def pictures(reader: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures, of texts that the model was not trained with, and reads right without a client."""
    folder, rng = tmp_path_factory.mktemp("pictures"), random.Random(SEED)
    for _ in range(3 * NUM_PICTURES):
        picture = random_picture(rng, is_for_tests=True)
        path = folder / f"{picture.text}.png"
        picture.image.save(path)
        if read(reader.url, path.read_bytes()) != picture.text:
            path.unlink()
        if len(list(folder.iterdir())) == NUM_PICTURES:
            return folder
    raise AssertionError("the model does not read")


def read(url: str, content: bytes) -> str:
    """The answer to a picture."""
    address = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": address}}]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("name", ["openai", "anthropic", "huggingface_hub", "langchain", "agents"])
def test_a_python_client_has_pictures_read(
    reader: RunningServer, pictures: Path, name: str
) -> None:

    run_cases(
        [python_or_skip(name), f"images/{name}_images.py", reader.url],
        CLIENTS,
        **MODULES,
        PICTURES=str(pictures),
    )


def test_vercel_s_package_has_pictures_read(reader: RunningServer, pictures: Path) -> None:
    script = "js/ai_images.mjs"
    run_cases([node_or_skip(), script, reader.url], CLIENTS, **MODULES, PICTURES=str(pictures))


def test_the_chat_page_has_pictures_read(reader: RunningServer, pictures: Path) -> None:
    if not PYTHON.exists() or shutil.which("chromium") is None:
        pytest.skip("no .venvs/pages or no chromium: make test-all SUITE=ecosystem brings them")
    script = "pages/images_cases.py"
    run_cases([str(PYTHON), script, reader.url], CLIENTS, **MODULES, PICTURES=str(pictures))
