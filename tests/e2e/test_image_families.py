"""Pictures of further families through the whole server, judged by transformers' processors and models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.e2e.test_images import (
    NUM_TOKENS,
    TEMPLATE,
    TILE,
    VOCAB_SIZE,
    chat,
    picture,
    post,
    url_of,
)
from tokenizers import AddedToken, Tokenizer
from transformers import Gemma3Processor, LlavaNextProcessor, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from millrace_launcher.demo import demo_folder
from millrace_testing.launcher.e2e import launch
from millrace_testing.models.vision_models import GRIDS, PROCESSOR, save_tiny_vision

ROWS = 9


def _gemma3(settings: dict[str, Any], tokens: PreTrainedTokenizerFast) -> Any:
    return Gemma3Processor(Gemma3ImageProcessorPil(**settings), tokens, image_seq_length=ROWS)


def _scanning(settings: dict[str, Any], tokens: PreTrainedTokenizerFast) -> Any:
    processor = _gemma3(settings, tokens)
    # Its own defaults take precedence over those of its processor of images.
    processor.images_kwargs = {name: settings[name] for name in _SCAN}
    return processor


def _llava_next(settings: dict[str, Any], tokens: PreTrainedTokenizerFast) -> Any:
    return LlavaNextProcessor(
        LlavaNextImageProcessorPil(**settings),
        tokens,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


class _Onevision(LlavaOnevisionProcessor):  # type: ignore[misc]
    """Without the processor of videos, which needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: PreTrainedTokenizerFast) -> None:
        ProcessorMixin.__init__(self, image_processor, tokenizer)
        self.num_image_tokens, self.vision_aspect_ratio = ROWS, "anyres_max_2"
        self.vision_feature_select_strategy = "full"
        self.image_token, self.video_token = "<image>", "<video>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids("<image>"), None


def _llava_onevision(settings: dict[str, Any], tokens: PreTrainedTokenizerFast) -> Any:
    return _Onevision(LlavaOnevisionImageProcessorPil(**settings), tokens)


def _paligemma(settings: dict[str, Any], tokens: PreTrainedTokenizerFast) -> Any:
    pictures = SiglipImageProcessorPil(**settings)
    pictures.image_seq_length = ROWS
    return PaliGemmaProcessor(pictures, tokens)


@dataclass(frozen=True)
class Case:
    """A family: its tokens, its settings, and transformers' processor."""

    written: str
    """What a template writes for an image."""
    tokens: tuple[str, ...]
    """The first one stands for a feature."""
    settings: dict[str, Any]
    processor: Callable[[dict[str, Any], PreTrainedTokenizerFast], Any]
    names: dict[str, str]


_SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 12,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
_SQUARE = {"size": {"height": TILE, "width": TILE}}
CASES = {
    "gemma3": Case(
        "<start_of_image>",
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        _SQUARE,
        _gemma3,
        {
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    ),
    "gemma3 with pan and scan": Case(
        "<start_of_image>",
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        _SQUARE | _SCAN,
        _scanning,
        {
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    ),
    "llava_next": Case(
        "<image>",
        ("<image>",),
        {
            "size": {"shortest_edge": TILE},
            "crop_size": {"height": TILE, "width": TILE},
            "image_grid_pinpoints": GRIDS,
        },
        _llava_next,
        {"image_token": "<image>"},
    ),
    "llava_onevision": Case(
        "<image>",
        ("<image>",),
        _SQUARE | {"image_grid_pinpoints": GRIDS},
        _llava_onevision,
        {"image_token": "<image>"},
    ),
    "paligemma": Case(
        "<image>", ("<image>", "<bos>"), _SQUARE, _paligemma, {"image_token": "<image>"}
    ),
}


def write_model(folder: Path, family: str) -> tuple[Any, Any, Tokenizer]:
    """A random model, transformers' processor for it, and the tokens of the demo model with those that images need."""
    case = CASES[family]
    tokens = Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))
    tokens.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in case.tokens]
    )
    tokens.add_special_tokens([AddedToken("<end_of_utterance>", normalized=False, special=True)])
    tokens.save(str(folder / "tokenizer.json"))
    settings = json.loads((demo_folder() / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE.replace("<image>", case.written)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    text = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 1024, "eos_token_id": 1}
    family = family.split(maxsplit=1)[0]
    if family == "gemma3":
        text["sliding_window"] = 16
    image_token_id = tokens.token_to_id(case.tokens[0])
    assert image_token_id is not None
    model = save_tiny_vision(folder, family, text=text, image_token_id=image_token_id)
    own = {**PROCESSOR, **case.settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(own))
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<bos>" if "<bos>" in case.tokens else None,
        eos_token="<end_of_utterance>",
        extra_special_tokens=case.names,
    )
    return model, case.processor(own, fast), tokens


@pytest.mark.long
@pytest.mark.parametrize("family", CASES)
def test_answers_about_pictures_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model, processor, tokens = write_model(tmp_path, family)
    written = CASES[family].written
    flags = (f"--model-id={tmp_path}", "--dtype=float32", "--deterministic=on")
    with launch(*flags, "--max-batch-prefill-tokens=16") as server:
        for number in range(3):
            image = picture(number)
            images = [image] * (1 + (family == "llava_onevision" and number == 2))
            if family == "paligemma":
                prompt = f"{written}what is it?"
                body = {
                    "inputs": f"![]({url_of(image)})what is it?",
                    "parameters": {"max_new_tokens": NUM_TOKENS, "details": True},
                }
                answer = post(server, "/generate", body)
                text = answer["generated_text"]
            else:
                shown = written * len(images)
                prompt = f"user:see {shown}what is it?<end_of_utterance>\nassistant:"
                answer = post(server, "/v1/chat/completions", chat(images))
                text = answer["choices"][0]["message"]["content"]
            made = processor(text=[prompt], images=[images], add_special_tokens=False)
            inputs = {
                name: torch.tensor(np.asarray(value))
                for name, value in made.items()
                if name != "labels"
            }
            with torch.no_grad():
                ids = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
            count = inputs["input_ids"].shape[1]
            # PaliGemma's processor adds tokens to its tokenizer that ours lacks.
            expected = tokens.decode(ids[0][count:].tolist(), skip_special_tokens=True)
            assert text.strip() == expected.strip()
            if family != "paligemma":
                assert answer["usage"]["prompt_tokens"] == count
