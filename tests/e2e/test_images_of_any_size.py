"""Pictures of any size through the whole server, with deepstack and positions of three axes, judged by transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from PIL import Image
from tests.e2e.test_images import NUM_TOKENS, VOCAB_SIZE, Streams, chat, picture, post
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from millrace_launcher.demo import demo_folder
from millrace_testing.launcher.e2e import Server, launch
from millrace_testing.models.vision_models import save_tiny_qwen

START, PAD, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }}:"
    "{% if turn.content is string %}{{ turn.content }}{% else %}{% for part in turn.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    ".\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


class Seeing(NamedTuple):
    folder: Path
    server: Server
    model: PreTrainedModel
    tokens: Tokenizer

    def answer(self, images: list[Image.Image]) -> tuple[int, str]:
        """transformers' number of prompt tokens, and its greedy answer to `chat(images)`."""
        settings = json.loads((self.folder / "preprocessor_config.json").read_text())
        inputs = Qwen2VLImageProcessorPil(**settings).preprocess(images, return_tensors="pt")
        counts = [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]]
        pictures = "".join(f"{START}{PAD * count}{END}" for count in counts)
        prompt = f"user:see {pictures}what is it?.\nassistant:"
        ids = torch.tensor([self.tokens.encode(prompt, add_special_tokens=False).ids])
        of_pictures = torch.eq(ids, pad_of(self.tokens)).int()
        with torch.no_grad():
            made: Any = self.model.generate(
                input_ids=ids,
                mm_token_type_ids=of_pictures,
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                **inputs,
            )
        return ids.shape[1], self.tokens.decode(made[0][ids.shape[1] :].tolist())


def pad_of(tokens: Tokenizer) -> int:
    id_ = tokens.token_to_id(PAD)
    assert id_ is not None
    return id_


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder: Path = tmp_path_factory.mktemp("seeing")
    tokens = Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))
    tokens.add_special_tokens([AddedToken(text, special=True) for text in (START, PAD, END)])
    tokens.save(str(folder / "tokenizer.json"))
    settings = json.loads((demo_folder() / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    text = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 1024, "eos_token_id": 1}
    model = save_tiny_qwen(folder, "qwen3_vl", text=text, image_token_id=pad_of(tokens))
    flags = "--dtype=float32", "--deterministic=on", "--max-restarts=1000", "--speculate=2"
    with launch(f"--model-id={folder}", *flags) as server:
        yield Seeing(folder, server, model, tokens)


@pytest.mark.parametrize("numbers", [[0], [1, 2]], ids=str)
def test_chats_with_pictures_are_those_of_transformers(seeing: Seeing, numbers: list[int]) -> None:
    images = [picture(number) for number in numbers]
    count, text = seeing.answer(images)
    for _ in range(2):
        answer = post(seeing.server, "/v1/chat/completions", chat(images))
        assert answer["usage"]["prompt_tokens"] == count
        assert answer["choices"][0]["message"]["content"].strip() == text.strip()


async def test_a_kill_changes_no_token_of_answers_with_pictures(seeing: Seeing) -> None:
    server, streams = seeing.server, Streams(seeing.server.url, first=20)
    alone = await streams.send(together=False)
    middle = streams.num_events // 2
    assert len(set(alone)) == len(alone)
    send = partial(streams.send, together=True)
    task, shard = await server.caught(
        send, is_time=lambda: streams.num_events > middle, num_running=1
    )
    psutil.Process.kill(shard)
    assert await task == alone
