"""Images against transformers: features and logits; and bits that depend on an image and its text alone."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.image_transforms import normalize, rescale
from transformers.image_utils import ChannelDimension
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from millrace_router.images.families import geometry_of
from millrace_router.images.qwen_vl import FAMILIES as QWEN_FAMILIES
from millrace_shard.batch.sequence import ImageGrid, ImageSpan
from millrace_shard.batch.step import Encode, Forward, StepResult
from millrace_shard.commands.composition import load
from millrace_shard.config import ShardConfig
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import StepInvalid, UnsupportedModel
from millrace_shard.models.description import ModelDescription
from millrace_shard.vision.grid_reduction import GridReduction
from millrace_shard.vision.registry import read_vision
from millrace_testing.engines.image_stepper import (
    ROWS,
    ImageStepper,
    answer_on_a_rank,
    read_encoder,
)
from millrace_testing.engines.kernels import KERNELS, make_kernels
from millrace_testing.engines.steps import Stepper, beside, ints, tiny_llama
from millrace_testing.models.models import CONFIGS, edit_json, prompt_of
from millrace_testing.models.vision_models import (
    GRIDS,
    IMAGE_TOKEN,
    KINDS,
    Prompt,
    normalised,
    picture,
    prompt_with,
    reference_features,
    save_tiny_qwen,
    save_tiny_vision,
    spec_of,
)
from millrace_testing.shards.ranks import run_ranks

GRID_FAMILIES = ("llava_next", "llava_onevision")
FAMILIES = tuple(kind for kind in KINDS if kind not in GRID_FAMILIES)


@pytest.fixture(scope="module", params=FAMILIES)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("vision")
    return folder, save_tiny_vision(folder, request.param)


def test_the_table_has_the_bits_of_the_processors_for_pil(
    saved: tuple[Path, PreTrainedModel],
) -> None:
    spec = spec_of(saved[0])
    pixels = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256)).copy()
    channels = {
        "data_format": ChannelDimension.FIRST,
        "input_data_format": ChannelDimension.FIRST,
    }
    scaled = rescale(pixels, spec.pixels.scale, **channels)
    expected = normalize(scaled, mean=spec.pixels.mean, std=spec.pixels.std, **channels)
    assert expected.dtype == np.float32
    assert np.array_equal(spec.pixels.table().numpy(), expected[:, 0])


@pytest.mark.parametrize("name", KERNELS)
def test_features_are_those_of_transformers(saved: tuple[Path, PreTrainedModel], name: str) -> None:
    folder, model = saved
    vision, pixels = (
        read_encoder(folder, make_kernels(name, deterministic=True)),
        picture(3, seed=1),
    )
    with torch.inference_mode():
        features = torch.cat([vision.encode(tile) for tile in pixels])
    assert features.shape == (3 * ROWS, 64)
    expected = reference_features(model, vision.spec, pixels)
    torch.testing.assert_close(features, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tile", [8, 16, 24])
def test_smaller_tiles_use_positions_of_the_whole_square(tmp_path: Path, tile: int) -> None:
    model = save_tiny_vision(tmp_path, "idefics3", tile=tile)
    vision = read_encoder(tmp_path, make_kernels("plain", deterministic=True))
    pixels = picture(1, seed=3, size=tile)
    with torch.inference_mode():
        features = vision.encode(pixels[0])
    expected = reference_features(model, vision.spec, pixels)
    torch.testing.assert_close(features, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", KERNELS)
def test_logits_after_images_are_those_of_transformers(
    saved: tuple[Path, PreTrainedModel], name: str
) -> None:
    folder, model = saved
    stepper = ImageStepper(folder, make_kernels(name, deterministic=True))
    prompt = prompt_with([picture(2, seed=1), picture(1, seed=2)], ROWS)
    stepper.put_all(prompt.pictures)
    result = stepper.run(stepper.admission_of(0, prompt))
    expected = prompt.logits(model, spec_of(folder))[-1].log_softmax(-1)
    best = expected.topk(5)
    assert result.ids.tolist() == [best.indices[0]]
    assert sorted(result.top_ids.tolist()) == sorted(best.indices.tolist())
    torch.testing.assert_close(
        torch.from_numpy(np.sort(result.top_logprobs)), best.values.sort().values, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    "vision",
    [
        {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": True},
        {"use_mean_pooling": False},
    ],
    ids=["rms_norm", "norm_of_output"],
)
def test_variants_of_internvl_have_the_features_of_transformers(
    tmp_path: Path, vision: dict[str, Any]
) -> None:
    model = save_tiny_vision(tmp_path, "internvl", **vision)
    encoder, pixels = (
        read_encoder(tmp_path, make_kernels("plain", deterministic=True)),
        picture(1, seed=1),
    )
    with torch.inference_mode():
        features = encoder.encode(pixels[0])
    expected = reference_features(model, encoder.spec, pixels)
    torch.testing.assert_close(features, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "section", "fields", "words"),
    [
        ("pixtral", None, {"vision_feature_layer": -2}, "vision_feature_layer"),
        ("pixtral", None, {"vision_feature_select_strategy": "default"}, "select_strategy"),
        ("pixtral", "vision_config", {"hidden_act": "relu"}, "hidden_act"),
        ("mistral3", "vision_config", {"num_attention_heads": 16}, "multiple of four"),
        ("mistral3", None, {"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ("internvl", "vision_config", {"norm_type": "other"}, "norm_type"),
        ("internvl", "vision_config", {"image_size": [24, 32]}, "square"),
        ("internvl", "vision_config", {"image_size": [32, 32]}, "positions for 32"),
        ("internvl", None, {"downsample_ratio": 0.4}, "downsample_ratio"),
        ("internvl", None, {"vision_feature_layer": -2}, "vision_feature_layer"),
    ],
)
def test_an_encoder_that_would_compute_something_else_is_refused(
    tmp_path: Path, family: str, section: str | None, fields: dict[str, Any], words: str
) -> None:
    save_tiny_vision(tmp_path, family)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    (raw if section is None else raw[section]).update(fields)
    path.write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModel, match=words):
        read_vision(tmp_path)


@pytest.mark.parametrize("family", ["pixtral", "mistral3"])
def test_images_of_any_size_have_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    model = save_tiny_vision(tmp_path, family, tile=40)
    stepper = ImageStepper(tmp_path, make_kernels("plain", deterministic=True))
    sizes = (8, 40), (24, 16), (40, 40)
    pictures = [picture(1, seed=1, size=tall, width=wide) for tall, wide in sizes]
    rows = [stepper.spec.rows_of(*size) for size in sizes]
    prompt = prompt_with(pictures, rows)
    stepper.put_all(prompt.pictures)
    result = stepper.run(stepper.admission_of(0, prompt))
    best = prompt.logits(model, stepper.spec)[-1].log_softmax(-1).topk(5)
    assert sorted(result.top_ids.tolist()) == sorted(best.indices.tolist())
    torch.testing.assert_close(
        torch.from_numpy(np.sort(result.top_logprobs)), best.values.sort().values, atol=1e-4, rtol=0
    )


def bits_of(result: StepResult) -> tuple[bytes, bytes, bytes]:
    return result.ids.tobytes(), result.top_ids.tobytes(), result.top_logprobs.tobytes()


DTYPES = {"plain": torch.float32, "cpu": torch.bfloat16}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "family",
    ["idefics3", "smolvlm", "gemma3", "llava", "paligemma", "internvl", "pixtral", "mistral3"],
)
def test_bits_do_not_depend_on_where_chunks_end(tmp_path: Path, name: str, family: str) -> None:
    save_tiny_vision(tmp_path, family)
    dtype = DTYPES[name]
    kernels = make_kernels(name, deterministic=True)
    prompt = prompt_with([picture(2, seed=1)], ROWS)
    whole, (first, count, _) = len(prompt.ids), prompt.spans[1]
    results = set()
    stepper = ImageStepper(tmp_path, kernels, dtype)
    stepper.put_all(prompt.pictures)
    free = [*stepper.free]
    for end in (whole, *range(first - 1, first + count + 2)):
        is_cut = first < end < first + count
        if (family == "gemma3" and is_cut) or (family == "paligemma" and end < whole):
            with pytest.raises(StepInvalid, match="ends before tokens that its own ones see"):
                stepper.chunks(stepper.admission_of(0, prompt), [end])
            stepper.runner.drop(ints([0]))
            continue
        stepper.free[:] = free
        sizes = [end, whole - end] if end < whole else [whole]
        results.add(bits_of(stepper.chunks(stepper.admission_of(0, prompt), sizes)))
        stepper.runner.drop(ints([0]))
    assert len(results) == 1


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("family", ["smolvlm", "gemma3", "paligemma", "internvl", "pixtral"])
def test_bits_do_not_depend_on_neighbours_and_their_pictures(
    tmp_path: Path, name: str, family: str
) -> None:
    save_tiny_vision(tmp_path, family)
    dtype = DTYPES[name]
    kernels = make_kernels(name, deterministic=True)
    new = partial(ImageStepper, tmp_path, kernels, dtype)
    prompt, other = prompt_with([picture(2, seed=1)], ROWS), prompt_with([picture(1, seed=9)], ROWS)
    alone = new()
    alone.put_all(prompt.pictures)
    encoded = alone.features.values[: 2 * ROWS].clone()
    expected = bits_of(alone.run(alone.admission_of(0, prompt)))
    beside_others = new()
    beside_others.run(beside_others.admission(5, prompt_of(7)))
    beside_others.put(other.pictures[0], slot=3, first_row=0)
    beside_others.put(prompt.pictures[0], slot=1, first_row=2 * ROWS)
    beside_others.encode([1, 3, 1], [1, 0, 0])
    assert torch.equal(beside_others.features.values[2 * ROWS : 4 * ROWS], encoded)
    beside_others.run(beside(beside_others.admission_of(2, other), [5]))
    result = beside_others.run(
        beside(beside_others.admission_of(0, prompt, first_row=2 * ROWS), [2, 5])
    )
    own = slice(0, 1)
    assert result.slots[own].tolist() == [0]
    assert bits_of(result)[2][: len(expected[2])] == expected[2]
    assert bits_of(result)[0][: len(expected[0])] == expected[0]


def test_other_pixels_have_another_answer(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, "idefics3")
    kernels, results = make_kernels("plain", deterministic=True), set()
    for seeds in ((1, 2), (2, 1), (1, 1)):
        stepper = ImageStepper(tmp_path, kernels)
        prompt = prompt_with([picture(1, seed=seed) for seed in seeds], ROWS)
        stepper.put_all(prompt.pictures)
        results.add(bits_of(stepper.run(stepper.admission_of(0, prompt))))
    assert len(results) == 3


def test_a_sequence_fails_alone_if_its_features_were_never_computed(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, "idefics3")
    stepper = ImageStepper(tmp_path, make_kernels("plain", deterministic=True))
    stepper.run(stepper.admission(5, prompt_of(7)))
    stepper.put(picture(1, seed=2), slot=0, first_row=ROWS - 1)
    stepper.encode([0], [0])
    prompt = prompt_with([picture(1, seed=1)], ROWS)
    result = stepper.run(beside(stepper.admission_of(0, prompt), [5]))
    assert result.failed_slots.tolist() == [0]
    assert result.slots.tolist() == [5]


def test_features_that_are_not_finite_are_reported(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, "idefics3")
    stepper = ImageStepper(tmp_path, make_kernels("plain", deterministic=True))
    assert stepper.runner.images is not None
    with torch.inference_mode():
        stepper.runner.images._vision.table[0, 0] = torch.inf
    black, grey = (np.full((1, 3, 24, 24), byte, dtype=np.uint8) for byte in (0, 128))
    stepper.put(black, slot=0)
    stepper.put(grey, slot=1, first_row=ROWS)
    assert stepper.encode([1, 0], [0, 0]).failed_images == (0,)


@pytest.mark.parametrize(
    ("span", "words"),
    [
        (ImageSpan(4, ROWS, 0), "not placeholders"),
        (ImageSpan(5, 99, 0), "outside"),
        (ImageSpan(5, ROWS, 58), "beyond the 60 rows"),
    ],
)
def test_images_that_contradict_their_prompt_fail_their_sequence(
    tmp_path: Path, span: ImageSpan, words: str
) -> None:
    save_tiny_vision(tmp_path, "idefics3")
    stepper = ImageStepper(tmp_path, make_kernels("plain", deterministic=True))
    step = stepper.admission_of(0, prompt_with([picture(1, seed=1)], ROWS))
    (sequence,) = step.change.admitted
    with pytest.raises(StepInvalid, match=words):
        stepper.batch.images.check(replace(sequence, images=(span,)))


def test_a_sequence_with_images_fails_alone_in_a_model_that_reads_none(tmp_path: Path) -> None:
    kernels = make_kernels("plain", deterministic=True)
    stepper = Stepper(tiny_llama(tmp_path, kernels, torch.float32), kernels, dtype=torch.float32)
    step = stepper.admission(0, prompt_of(9))
    (sequence,) = step.change.admitted
    with_image = replace(sequence, images=(ImageSpan(0, 1, 0),))
    stepper.run(stepper.admission(5, prompt_of(7)))
    change = replace(step.change, admitted=(with_image,))
    result = stepper.run(beside(replace(step, change=change), [5]))
    assert (result.failed_slots.tolist(), result.slots.tolist()) == ([0], [5])
    with pytest.raises(StepInvalid, match="reads no images"):
        stepper.runner.encode(Encode(image_slots=ints([0]), units=ints([0])))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("family", ["idefics3", "llava", "internvl", "mistral3"])
def test_bits_do_not_depend_on_the_parts_of_layers_in_a_step(
    tmp_path: Path, name: str, family: str, size: int
) -> None:
    save_tiny_vision(tmp_path, family)
    vision = read_encoder(tmp_path, make_kernels(name, deterministic=True), DTYPES[name])
    pixels, tower, most = picture(1, seed=1)[0], vision.tower, vision.spec.num_layers
    with torch.inference_mode():
        state = tower.begin(vision.inputs(pixels))
        for start in range(0, most, size):
            state = tower.run(state, slice(start, min(start + size, most)))
        assert torch.equal(tower.end(state), vision.encode(pixels))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("family", ["idefics3", "internvl", "pixtral", "mistral3"])
def test_a_tile_in_several_steps_has_the_bits_of_one(
    tmp_path: Path, name: str, family: str
) -> None:
    save_tiny_vision(tmp_path, family)
    kernels = make_kernels(name, deterministic=True)
    whole, parts = (ImageStepper(tmp_path, kernels, DTYPES[name]) for _ in range(2))
    pixels, others = picture(2, seed=1), picture(1, seed=2)
    most = whole.spec.num_layers
    whole.put(pixels, slot=0)
    expected = whole.encode([0, 0], [0, 1])
    images = parts.runner.images
    assert images is not None
    parts.put(pixels, slot=0)
    parts.put(others, slot=1, first_row=2 * ROWS)
    first = parts.encode([0], [0], [1])
    assert not parts.features.values[:ROWS].any()
    parts.encode([1], [0])
    parts.encode([0, 0], [0, 1], [most - 1, most])
    assert torch.equal(parts.features.values[: 2 * ROWS], whole.features.values[: 2 * ROWS])
    assert expected.checksum != first.checksum == 0
    parts.encode([0], [0], [1])
    for unit, count in ((1, 1), (0, most), (0, 0)):
        with pytest.raises(StepInvalid, match="cannot follow"):
            parts.encode([0], [unit], [count])
        images.clear()
        parts.put(pixels, slot=0)
        parts.encode([0], [0], [1])


def after_prefix(whole: Forward, cached: int) -> Forward:
    """The admission `whole` in slot 1, where `cached` tokens are in its blocks."""
    (sequence,) = whole.change.admitted
    again = replace(sequence, slot=1, cached_tokens=cached)
    slots = ints([1] * len(whole.change.grown_blocks))
    return Forward(
        change=replace(whole.change, admitted=(again,), grown_slots=slots),
        chunk_slots=ints([1]),
        chunk_tokens=ints([sequence.num_inputs - cached]),
    )


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "family",
    ["idefics3", "smolvlm", "gemma3", "llava", "paligemma", "internvl", "pixtral", "mistral3"],
)
def test_bits_do_not_depend_on_a_prefix_that_ends_inside_an_image(
    tmp_path: Path, name: str, family: str
) -> None:
    save_tiny_vision(tmp_path, family)
    kernels = make_kernels(name, deterministic=True)
    stepper = ImageStepper(tmp_path, kernels, DTYPES[name])
    prompt = prompt_with([picture(2, seed=1)], ROWS)
    stepper.put_all(prompt.pictures)
    whole = stepper.admission_of(0, prompt)
    expected = bits_of(stepper.run(whole))
    stepper.runner.drop(ints([0]))
    for cached in (prompt.spans[0][0] + 4, prompt.spans[1][0] + 1):
        assert bits_of(stepper.run(after_prefix(whole, cached))) == expected
        stepper.runner.drop(ints([1]))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("family", ["gemma3", "paligemma"])
def test_a_sequence_that_comes_back_with_its_tokens_has_the_same_bits(
    tmp_path: Path, name: str, family: str
) -> None:
    save_tiny_vision(tmp_path, family)
    kernels = make_kernels(name, deterministic=True)
    stepper = ImageStepper(tmp_path, kernels, DTYPES[name])
    prompt = prompt_with([picture(1, seed=1)], ROWS)
    stepper.put_all(prompt.pictures)
    ids = stepper.run(stepper.admission_of(0, prompt)).ids.tolist()
    for _ in range(2):
        ids += stepper.decode([0]).ids.tolist()
    expected = bits_of(stepper.decode([0]))
    step = stepper.admission_of(1, replace(prompt, ids=[*prompt.ids, *ids]))
    (sequence,) = step.change.admitted
    again = replace(sequence, generated_tokens=len(ids))
    change = replace(step.change, admitted=(again,))
    sizes = [len(prompt.ids), 1, len(ids) - 1]
    assert bits_of(stepper.chunks(replace(step, change=change), sizes)) == expected


def test_paligemma_2_has_the_answer_of_transformers_and_prompts_within_its_window(
    tmp_path: Path,
) -> None:
    text = {"model_type": "gemma2", **CONFIGS["gemma2"], "sliding_window": 24}
    model = save_tiny_vision(tmp_path, "paligemma", text=text)
    stepper = ImageStepper(tmp_path, make_kernels("plain", deterministic=True))
    prompt = prompt_with([picture(1, seed=1)], ROWS)
    stepper.put_all(prompt.pictures)
    result = stepper.run(stepper.admission_of(0, prompt))
    expected = prompt.logits(model, spec_of(tmp_path))[-1].log_softmax(-1).topk(5)
    torch.testing.assert_close(
        torch.from_numpy(np.sort(result.top_logprobs)),
        expected.values.sort().values,
        atol=1e-4,
        rtol=0,
    )
    assert ModelDescription.read(tmp_path).info().max_position_embeddings == 24
    raw = json.loads((tmp_path / "config.json").read_text())
    edit_json(tmp_path / "config.json", text_config={**raw["text_config"], "sliding_window": ROWS})
    with pytest.raises(UnsupportedModel, match="sliding_window=9"):
        read_vision(tmp_path)


def packed(
    stepper: ImageStepper, size: tuple[int, int], *, low: bool = False, first_row: int = 0
) -> Prompt:
    """Encode a picture of this size in pixels, as the router has its tiles and features placed, and return a prompt."""
    spec = stepper.spec
    settings = {**KINDS[spec.family].sizes(24), "image_grid_pinpoints": GRIDS}
    geometry = geometry_of(spec.family, settings | {"max_grid_tiles": spec.max_grid_tiles})
    layout = geometry.layout(*size, "low" if low else "auto")
    placed = size, (layout.rows, layout.columns), spec.rows_per_tile
    reduction = geometry.reduction(*placed)
    tiles = picture(layout.num_tiles, seed=1)
    stepper.put(
        tiles,
        slot=0,
        first_row=first_row,
        reduction=None if reduction is None else GridReduction(*astuple(reduction)),
    )
    generator = torch.Generator().manual_seed(0)
    before, after = torch.randint(3, IMAGE_TOKEN, (2, 4), generator=generator).tolist()
    spans, position = list[tuple[int, int, int]](), len(before)
    for row, count in geometry.order(*placed) or [(0, spec.rows_per_tile + 1)]:
        spans.append((position, count, row))
        position += count
    ids = [*before, *[IMAGE_TOKEN] * (position - len(before)), *after]
    return Prompt(ids, spans, [tiles])


@pytest.mark.parametrize("family", GRID_FAMILIES)
@pytest.mark.parametrize("size", [(40, 50), (30, 90), (90, 20)], ids=str)
def test_a_grid_is_packed_as_in_transformers(
    tmp_path: Path, family: str, size: tuple[int, int]
) -> None:
    model = save_tiny_vision(tmp_path, family)
    stepper = ImageStepper(tmp_path, make_kernels("plain", deterministic=True), num_rows=64)
    for low in (False, True) if family == "llava_onevision" else (False,):
        prompt = packed(stepper, size, low=low)
        (tiles,) = prompt.pictures
        stepper.encode([0] * len(tiles), range(len(tiles)))
        result = stepper.run(stepper.admission_of(0, prompt))
        # The tile of the whole picture is the first there; of several pictures, each is one tile.
        values = normalised(stepper.spec, np.concatenate([tiles[-1:], tiles[:-1]]))
        more = {"batch_num_images": torch.tensor([2])} if low else {}
        with torch.no_grad():
            ids = torch.tensor([prompt.ids])
            out = model(
                input_ids=torch.cat([ids, ids], 1) if low else ids,
                pixel_values=torch.stack([values] * (1 + low)),
                image_sizes=torch.tensor([size] * (1 + low)),
                **more,
            )
        best = out.logits[0, len(prompt.ids) - 1].log_softmax(-1).topk(5)
        torch.testing.assert_close(
            torch.from_numpy(np.sort(result.top_logprobs)),
            best.values.sort().values,
            atol=1e-4,
            rtol=0,
        )
        assert sorted(result.top_ids.tolist()) == sorted(best.indices.tolist())
        stepper.runner.drop(ints([0]))
        stepper.runner.images.clear()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("reduction", "words"),
    [
        (GridReduction(3, 0, 0, 1, 1), "4 tiles are not a grid of 3 columns"),
        (GridReduction(0, 0, 0, 1, 1), "4 tiles are not a grid of 0 columns"),
        (GridReduction(2, 3, 0, 1, 1), "0 x 6 features do not become 1 x 1"),
        (GridReduction(2, 1, 2, 4, 3), "4 x 2 features do not become 4 x 3"),
        (GridReduction(2, 1, 2, 4, 2), None),
    ],
)
def test_a_reduction_that_cannot_be_is_refused(
    tmp_path: Path, reduction: GridReduction, words: str | None
) -> None:
    save_tiny_vision(tmp_path, "llava_onevision")
    spec = spec_of(tmp_path)
    assert reduction.refusal(spec, 4) == words
    edit_json(tmp_path / "config.json", vision_aspect_ratio="anyres")
    with pytest.raises(UnsupportedModel, match="vision_aspect_ratio='anyres'"):
        read_vision(tmp_path)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("family", GRID_FAMILIES)
def test_bits_of_a_grid_do_not_depend_on_company_chunks_and_cached_prefixes(
    tmp_path: Path, name: str, family: str
) -> None:
    save_tiny_vision(tmp_path, family)
    kernels = make_kernels(name, deterministic=True)
    alone, other = (ImageStepper(tmp_path, kernels, DTYPES[name], num_rows=80) for _ in range(2))
    prompt = packed(alone, (40, 50))
    (tiles,) = prompt.pictures
    alone.encode([0] * len(tiles), range(len(tiles)))
    whole = alone.admission_of(0, prompt)
    expected = bits_of(alone.run(whole))
    # The other picture may have a row more than its tile.
    behind = ROWS + 1
    packed(other, (40, 50), first_row=behind)
    other.put(picture(1, seed=5), slot=1)
    most = other.spec.num_layers
    other.encode([0, 0, 1], [0, 1, 0], [most, 3, most])
    other.encode([0, 0, 0, 0], [1, 2, 3, 4], [most - 3, most, most, most])
    assert torch.equal(other.features.values[behind:][:64], alone.features.values[:64])
    alone.runner.drop(ints([0]))
    for cached in (6, 20):
        assert bits_of(alone.run(after_prefix(whole, cached))) == expected
        alone.runner.drop(ints([1]))
    step = other.admission_of(0, prompt, first_row=behind)
    for end in (5, 14, 17, len(prompt.ids) - 5):
        other.free[:] = range(100, 0, -1)
        assert bits_of(other.chunks(step, [end, len(prompt.ids) - end])) == expected
        other.runner.drop(ints([0]))


@pytest.mark.usefixtures("as_on_cuda")
def test_a_device_that_is_not_waited_for_computes_the_same(tmp_path: Path) -> None:
    model = save_tiny_vision(tmp_path, "idefics3")
    stepper = ImageStepper(tmp_path, make_kernels("plain", deterministic=True))
    prompt = prompt_with([picture(2, seed=1)], ROWS)
    stepper.put_all(prompt.pictures)
    result = stepper.run(stepper.admission_of(0, prompt))
    assert result.ids.tolist() == [int(prompt.logits(model, spec_of(tmp_path))[-1].argmax())]


@pytest.mark.parametrize(
    "family",
    [
        "idefics3",
        "smolvlm",
        "gemma3",
        "llava",
        "llava_next",
        "llava_onevision",
        "paligemma",
        "internvl",
        "pixtral",
        "mistral3",
    ],
)
def test_two_ranks_have_the_features_of_one(tmp_path: Path, family: str) -> None:
    save_tiny_vision(tmp_path / "model", family)
    ids, scores, checksum = answer_on_a_rank(ProcessGroup.single(), tmp_path / "model")
    first, second = run_ranks(tmp_path, 2, answer_on_a_rank, tmp_path / "model")
    assert first == second
    assert (first[0], first[2]) == (ids, checksum)
    assert first[1] == pytest.approx(scores, abs=1e-4)


def test_the_command_loads_the_encoder_of_a_model_that_reads_images(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, "smolvlm")
    config = ShardConfig.from_args([str(tmp_path), "--disable-custom-kernels"])
    loaded = load(config, torch.device("cpu"))
    assert loaded.vision is not None
    assert loaded.vision.spec == spec_of(tmp_path)
    edit_json(tmp_path / "preprocessor_config.json", image_std=0)
    with pytest.raises(UnsupportedModel, match="image_std"):
        load(config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image_std": [1, 0, 1]}, "image_std"),
        ({"image_mean": [1, 2]}, "image_mean"),
        ({"max_image_size": {"longest_edge": 26}}, "do not fit patches"),
        ({"max_image_size": {"longest_edge": 48}}, "do not fit patches"),
        ({"rescale_factor": "x"}, "rescale_factor"),
    ],
)
def test_a_processor_that_cannot_be_is_refused(
    tmp_path: Path, fields: dict[str, object], words: str
) -> None:
    save_tiny_vision(tmp_path, "idefics3")
    edit_json(tmp_path / "preprocessor_config.json", **fields)
    with pytest.raises(UnsupportedModel, match=words):
        read_vision(tmp_path)


def test_an_image_of_gemma_3_has_further_tiles_only_with_pan_and_scan(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, "gemma3")
    path = tmp_path / "preprocessor_config.json"
    for scans, number, most in ((False, 3, 1), (True, None, 5), (True, 7, 8)):
        edit_json(path, do_pan_and_scan=scans, pan_and_scan_max_num_crops=number)
        assert spec_of(tmp_path).max_tiles == most


PROCESSORS = {
    **dict.fromkeys(("idefics3", "smolvlm"), Idefics3ImageProcessorPil),
    "gemma3": Gemma3ImageProcessorPil,
    "llava": CLIPImageProcessorPil,
    "llava_next": LlavaNextImageProcessorPil,
    "llava_onevision": LlavaOnevisionImageProcessorPil,
    "paligemma": SiglipImageProcessorPil,
    "internvl": GotOcr2ImageProcessorPil,
    **dict.fromkeys(("pixtral", "mistral3"), PixtralImageProcessorPil),
    **dict.fromkeys(QWEN_FAMILIES, Qwen2VLImageProcessorPil),
}


@pytest.mark.parametrize("family", PROCESSORS)
def test_the_one_file_of_newer_checkpoints_is_read_as_the_older_one(
    tmp_path: Path, family: str
) -> None:
    (save_tiny_vision if family in KINDS else save_tiny_qwen)(tmp_path, family)
    older = tmp_path / "preprocessor_config.json"
    settings, spec = json.loads(older.read_text()), spec_of(tmp_path)
    if family in GRID_FAMILIES:
        settings["image_grid_pinpoints"] = GRIDS
    written = json.loads(PROCESSORS[family](**settings).to_json_string())
    newer = {
        "image_processor": written | {"do_center_crop": None, "do_convert_rgb": None},
        "image_seq_length": ROWS,
    }
    (tmp_path / "processor_config.json").write_text(json.dumps(newer))
    # A file that is left over comes second.
    edit_json(older, image_std=0)
    assert read_vision(tmp_path) == spec
    older.unlink()
    assert read_vision(tmp_path) == spec
    own = {"cell": spec.cell, "max_grid_tiles": spec.max_grid_tiles}
    geometry = geometry_of(family, newer["image_processor"] | own)
    assert geometry == geometry_of(family, settings | own)
    assert geometry.unit == (spec.cell or spec.tile_size)


def test_without_its_processor_a_model_reads_text_alone(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, "idefics3")
    (tmp_path / "preprocessor_config.json").unlink()
    assert read_vision(tmp_path) is None


def test_a_model_whose_prompts_see_later_tokens_is_refused_without_its_processor_or_encoder(
    tmp_path: Path,
) -> None:
    save_tiny_vision(tmp_path, "paligemma")
    path = tmp_path / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if "projector" not in k}, path)
    with pytest.raises(UnsupportedModel, match="lack the encoder"):
        read_encoder(tmp_path, make_kernels("plain", deterministic=True))
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(UnsupportedModel, match="lacks preprocessor_config"):
        read_vision(tmp_path)


def test_the_digest_is_that_of_settings_and_weights(tmp_path: Path) -> None:
    kernels, digests = make_kernels("plain", deterministic=True), list[int]()
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        save_tiny_vision(tmp_path / name, "idefics3", seed=seed)
        digests.append(read_encoder(tmp_path / name, kernels).digest)
    edit_json(tmp_path / "same" / "preprocessor_config.json", image_mean=[0.5, 0.5, 0.4])
    digests.append(read_encoder(tmp_path / "same", kernels).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def encoded(folder: Path, threads: int) -> Tensor:
    torch.set_num_threads(threads)
    kernels = make_kernels("cpu", deterministic=True)
    vision = read_encoder(folder, kernels, torch.bfloat16)
    with torch.inference_mode():
        features = vision.encode(picture(1, seed=4)[0])
    torch.set_num_threads(1)
    return features


def test_features_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, "idefics3")
    assert torch.equal(encoded(tmp_path, 1), encoded(tmp_path, 2))


def test_grids_of_images_move_no_positions_of_a_model_with_one_axis(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, "pixtral")
    stepper = ImageStepper(tmp_path, make_kernels("plain", deterministic=True))
    (sequence,) = stepper.admission(0, list(range(3, 9))).change.admitted
    images = stepper.batch.images
    images.admit(replace(sequence, image_grids=(ImageGrid(1, 2, 2),)))
    one = ints([1])
    assert images.axes(ints([0]), one, one) is None
