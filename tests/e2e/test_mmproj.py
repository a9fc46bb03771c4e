"""A GGUF file with an mmproj file beside it through the whole server, judged by transformers' processor and model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tests.e2e.test_images import NUM_TOKENS, chat, picture, post
from tests.e2e.test_images_of_any_size import END, PAD, START, TEMPLATE
from tokenizers import Tokenizer
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from millrace_router.images.internvl import BEGIN, CONTEXT
from millrace_router.images.internvl import END as END_OF_TILES
from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_testing.launcher.e2e import launch
from millrace_testing.models.gguf_files import CONTROL, tokenizer_metadata
from millrace_testing.models.mmproj_files import TinyPair
from millrace_testing.models.vision_models import PROCESSOR, QWEN_CELL, QWEN_SIZE

KINDS = "tokenizer.ggml.token_type"
TOKENS = "tokenizer.ggml.tokens"
ENDS = [0, 2]


def tokenizer(special: Sequence[str], template: str) -> dict[str, Any]:
    """A byte-level tokenizer's metadata with the tokens of images and a template that writes them."""
    metadata = tokenizer_metadata()
    return {
        **metadata,
        TOKENS: [*metadata[TOKENS], *special],
        KINDS: [*metadata[KINDS], *[CONTROL] * len(special)],
        "tokenizer.chat_template": template,
    }


def answered(model: Path, image: Image.Image) -> tuple[int, list[int]]:
    """Tokens of the prompt, and ids of the answer, of a server that is started for one chat."""
    with launch(f"--model-id={model}", "--dtype=float32", "--deterministic=on") as server:
        body = chat([image]) | {"logprobs": True, "return_tokens_as_token_ids": True}
        answer = post(server, "/v1/chat/completions", body)
    ids_of = (each["token"] for each in answer["choices"][0]["logprobs"]["content"])
    ids = [int(text.removeprefix("token_id:")) for text in ids_of]
    return answer["usage"]["prompt_tokens"], ids


def made_by_transformers(pair: TinyPair, ids: torch.Tensor, **inputs: Any) -> list[int]:
    with torch.no_grad():
        made: Any = pair.model.generate(
            input_ids=ids,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=ENDS,
            **inputs,
        )
    return list(made[0][ids.shape[1] :].tolist())


def ids_in(folder: Path, prompt: str) -> torch.Tensor:
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return torch.tensor([tokens.encode(prompt, add_special_tokens=False).ids])


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_5"])
def test_a_chat_with_a_picture_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    metadata = tokenizer([START, END, PAD], TEMPLATE)
    text = {"vocab_size": len(metadata[TOKENS]), "max_position_embeddings": 1024}
    pair = TinyPair(family, tmp_path / "hf", tokens=metadata, of_text=text)
    file, encoder = pair.write(tmp_path / "m.gguf")
    folder = prepare_gguf(file, tmp_path / "cache", tokenizer=None, mmproj=encoder)
    image = picture(1)
    settings = PROCESSOR | {"patch_size": QWEN_CELL // 2, "size": QWEN_SIZE}
    inputs = Qwen2VLImageProcessorPil(**settings).preprocess([image], return_tensors="pt")
    count = int(inputs["image_grid_thw"].prod()) // 4
    ids = ids_in(folder, f"user:see {START}{PAD * count}{END}what is it?.\nassistant:")
    kinds = torch.eq(ids, len(metadata[TOKENS]) - 1).int()
    expected = made_by_transformers(pair, ids, mm_token_type_ids=kinds, **inputs)
    assert answered(file, image) == (ids.shape[1], expected)


@pytest.mark.long
def test_a_chat_with_tiles_is_that_of_transformers(tmp_path: Path) -> None:
    special = [BEGIN, END_OF_TILES, CONTEXT]
    template = TEMPLATE.replace(START + PAD + END, CONTEXT)
    metadata = tokenizer(special, template)
    text = {"vocab_size": len(metadata[TOKENS]), "max_position_embeddings": 1024}
    pair = TinyPair("internvl", tmp_path / "hf", tokens=metadata, of_text=text)
    file, encoder = pair.write(tmp_path / "m.gguf")
    folder = prepare_gguf(file, tmp_path / "cache", tokenizer=None, mmproj=encoder)
    image = picture(1)
    settings = {**PROCESSOR, "size": {"height": 24, "width": 24}, "max_patches": 6}
    made = GotOcr2ImageProcessorPil(**settings, crop_to_patches=True)
    pixels = made.preprocess([image], return_tensors="pt")["pixel_values"]
    assert len(pixels) > 2
    context = BEGIN + CONTEXT * 9 * len(pixels) + END_OF_TILES
    ids = ids_in(folder, f"user:see {context}what is it?.\nassistant:")
    expected = made_by_transformers(pair, ids, pixel_values=pixels)
    assert answered(file, image) == (ids.shape[1], expected)
