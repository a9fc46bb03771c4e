"""A GGUF file with an mmproj file beside it through the whole server, judged by transformers' processor and model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.test_images import NUM_TOKENS, chat, picture, post
from tests.e2e.test_images_of_any_size import END, PAD, START, TEMPLATE
from tokenizers import Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_testing.launcher.e2e import launch
from millrace_testing.models.gguf_files import CONTROL, tokenizer_metadata
from millrace_testing.models.mmproj_files import TinyPair
from millrace_testing.models.vision_models import PROCESSOR, QWEN_CELL, QWEN_SIZE

KINDS = "tokenizer.ggml.token_type"
TOKENS = "tokenizer.ggml.tokens"
ENDS = [0, 2]


def tokenizer() -> dict[str, Any]:
    """A byte-level tokenizer's metadata with the tokens of images and a template that writes them."""
    metadata = tokenizer_metadata()
    special = [START, END, PAD]
    return {
        **metadata,
        TOKENS: [*metadata[TOKENS], *special],
        KINDS: [*metadata[KINDS], *[CONTROL] * len(special)],
        "tokenizer.chat_template": TEMPLATE,
    }


@pytest.mark.long
def test_a_chat_with_a_picture_is_that_of_transformers(tmp_path: Path) -> None:
    metadata = tokenizer()
    text = {"vocab_size": len(metadata[TOKENS]), "max_position_embeddings": 1024}
    pair = TinyPair("qwen2_vl", tmp_path / "hf", tokens=metadata, of_text=text)
    file, encoder = pair.write(tmp_path / "m.gguf")
    folder = prepare_gguf(file, tmp_path / "cache", tokenizer=None, mmproj=encoder)
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    image = picture(1)
    flags = "--dtype=float32", "--deterministic=on"
    with launch(f"--model-id={file}", *flags) as server:
        body = chat([image]) | {"logprobs": True, "return_tokens_as_token_ids": True}
        answer = post(server, "/v1/chat/completions", body)
    settings = PROCESSOR | {"patch_size": QWEN_CELL // 2, "size": QWEN_SIZE}
    inputs = Qwen2VLImageProcessorPil(**settings).preprocess([image], return_tensors="pt")
    count = int(inputs["image_grid_thw"].prod()) // 4
    prompt = f"user:see {START}{PAD * count}{END}what is it?.\nassistant:"
    ids = torch.tensor([tokens.encode(prompt, add_special_tokens=False).ids])
    with torch.no_grad():
        made: Any = pair.model.generate(
            input_ids=ids,
            mm_token_type_ids=torch.eq(ids, len(metadata[TOKENS]) - 1).int(),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=ENDS,
            **inputs,
        )
    assert answer["usage"]["prompt_tokens"] == ids.shape[1]
    ids_of = (each["token"] for each in answer["choices"][0]["logprobs"]["content"])
    answered = [int(text.removeprefix("token_id:")) for text in ids_of]
    assert answered == made[0][ids.shape[1] :].tolist()
