"""Images of any size with positions of three axes: Qwen's encoders and decoders against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from millrace_shard.batch.sequence import ImageGrid
from millrace_shard.batch.step import Forward, StepResult
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import StepInvalid, UnsupportedModel
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.model_runner.graph_capture import GraphSettings
from millrace_shard.vision.qwen_vl import cut
from millrace_shard.vision.registry import read_vision
from millrace_shard.vision.spec import PARTS
from millrace_testing.engines.graphs import Recorder
from millrace_testing.engines.image_stepper import ImageStepper, read_encoder
from millrace_testing.engines.kernels import KERNELS, make_kernels
from millrace_testing.engines.steps import beside, ints
from millrace_testing.models.models import edit_json, prompt_of
from millrace_testing.models.vision_models import (
    IMAGE_TOKEN,
    QWEN_CELL,
    of_processor,
    prompt_of_sizes,
    save_tiny_qwen,
    spec_of,
)
from millrace_testing.shards.ranks import run_ranks

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
SIZES = ((3, 5), (4, 2), (1, 1))
DTYPES = {"plain": torch.float32, "cpu": torch.bfloat16}


@pytest.fixture(scope="module", params=FAMILIES)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("vision")
    return folder, save_tiny_qwen(folder, request.param)


def bits_of(result: StepResult) -> tuple[bytes, bytes]:
    return result.top_ids[:5].tobytes(), result.top_logprobs[:5].tobytes()


@pytest.mark.parametrize("name", KERNELS)
def test_patches_and_features_are_those_of_transformers(
    saved: tuple[Path, PreTrainedModel], name: str
) -> None:
    folder, model = saved
    vision = read_encoder(folder, make_kernels(name, deterministic=True))
    pictures = prompt_of_sizes(SIZES).pictures
    inputs = of_processor(QWEN_CELL // 2, pictures)
    with torch.inference_mode():
        patches = [cut(vision.inputs(each[0]), QWEN_CELL // 2, 2) for each in pictures]
        features = torch.cat([vision.encode(each[0]) for each in pictures])
        out = model.get_image_features(**inputs, return_dict=True)
    assert torch.equal(torch.cat(patches), inputs["pixel_values"])
    expected = [torch.cat(out.pooler_output)]
    stacked = getattr(out, "deepstack_features", None) or []
    expected += [each if isinstance(each, torch.Tensor) else torch.cat(each) for each in stacked]
    torch.testing.assert_close(features, torch.cat(expected, dim=1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", KERNELS)
def test_logits_after_images_and_later_ones_are_those_of_transformers(
    saved: tuple[Path, PreTrainedModel], name: str
) -> None:
    folder, model = saved
    stepper = ImageStepper(folder, make_kernels(name, deterministic=True))
    prompt = prompt_of_sizes(SIZES)
    stepper.put_all(prompt.pictures)
    results = [stepper.run(stepper.admission_of(0, prompt))]
    results += [stepper.decode([0]) for _ in range(3)]
    for result in results:
        expected = prompt.logits(model, spec_of(folder))[-1].log_softmax(-1)
        best = expected.topk(5)
        assert result.ids.tolist() == [best.indices[0]]
        torch.testing.assert_close(
            torch.from_numpy(np.sort(result.top_logprobs)),
            best.values.sort().values,
            atol=1e-4,
            rtol=0,
        )
        prompt.ids.append(int(result.ids[0]))
        if result.ids[0] == IMAGE_TOKEN:
            break  # transformers would look for an image.


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_graphs_decode_after_images_with_the_bits_of_eager_steps(
    family: str, name: str, tmp_path: Path
) -> None:
    save_tiny_qwen(tmp_path, family)
    dtype, recorder = DTYPES[name], Recorder()
    # Plain torch reads lengths on the host in deterministic mode.
    kernels = make_kernels(name, deterministic=name == "cpu")
    settings = GraphSettings((1, 2, 4), recorder.new_capture)
    prompt, results = prompt_of_sizes(SIZES), []
    for graphs in (settings, None):
        stepper = ImageStepper(tmp_path, kernels, dtype, graphs=graphs)
        stepper.put_all(prompt.pictures)
        own = [stepper.run(stepper.admission_of(0, prompt))]
        own.append(stepper.run(stepper.admission(1, prompt_of(9), top_n_tokens=5)))
        own += [stepper.decode(slots) for slots in ([0], [1, 0], [0, 1], [1])]
        # The slot of the pictures goes to a prompt without any.
        step = stepper.admission(0, prompt_of(7), top_n_tokens=5)
        change = replace(step.change, dropped_slots=ints([0]))
        own.append(stepper.run(replace(step, change=change)))
        results.append([*own, stepper.decode([0])])
    for ours, theirs in zip(*results, strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist()
        most = 0 if kernels.deterministic else 1e-5
        np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=most, rtol=0)
    assert recorder.replays() == {1: 3, 2: 2}


@pytest.mark.parametrize("name", KERNELS)
def test_bits_do_not_depend_on_chunks_cached_prefixes_and_neighbours(
    saved: tuple[Path, PreTrainedModel], name: str
) -> None:
    folder, _ = saved
    dtype = DTYPES[name]
    kernels = make_kernels(name, deterministic=True)
    stepper = ImageStepper(folder, kernels, dtype)
    prompt = prompt_of_sizes(((3, 4), (2, 3)))
    count = len(prompt.ids)
    stepper.put_all(prompt.pictures)
    whole = stepper.admission_of(0, prompt)
    first, later = stepper.run(whole), stepper.decode([0])
    expected = bits_of(first), bits_of(later)
    blocks = len(whole.change.grown_blocks)
    stepper.runner.drop(ints([0]))
    (sequence,) = whole.change.admitted
    # A cached prefix of recurrent layers is a copy of their state, which test_recurrent.py has.
    is_recurrent = spec_of(folder).family.startswith("qwen3_5")
    for cached in (
        ()
        if is_recurrent
        else (3, prompt.spans[0][0] + 4, prompt.spans[1][0] + 1, prompt.spans[1][0] + 8)
    ):
        again = replace(sequence, slot=1, cached_tokens=cached)
        change = replace(whole.change, admitted=(again,), grown_slots=ints([1] * blocks))
        rest = ints([count - cached])
        step = Forward(change=change, chunk_slots=ints([1]), chunk_tokens=rest)
        assert (bits_of(stepper.run(step)), bits_of(stepper.decode([1]))) == expected
        stepper.runner.drop(ints([1]))
    sizes = [prompt.spans[0][0] + 5, 9, count - prompt.spans[0][0] - 14]
    beside_others = ImageStepper(folder, kernels, dtype)
    beside_others.run(beside_others.admission(5, prompt_of(7)))
    neighbour = ImageStepper(folder, kernels, dtype)
    neighbour.run(neighbour.admission(5, prompt_of(7)))
    beside_others.put_all(prompt.pictures)
    assert (
        bits_of(beside_others.chunks(beside_others.admission_of(0, prompt), sizes)) == expected[0]
    )
    beside_others.runner.drop(ints([0]))
    result = beside_others.run(beside(beside_others.admission_of(0, prompt), [5]))
    assert bits_of(result) == expected[0]
    alone = neighbour.decode([5])
    assert result.ids[result.slots == 5].tolist() == alone.ids.tolist()
    assert result.logprobs[result.slots == 5].tobytes() == alone.logprobs.tobytes()


def test_an_image_in_several_steps_has_the_bits_of_one(
    saved: tuple[Path, PreTrainedModel],
) -> None:
    folder, _ = saved
    kernels = make_kernels("cpu", deterministic=True)
    whole, parts = (ImageStepper(folder, kernels, torch.bfloat16) for _ in range(2))
    (pixels,) = prompt_of_sizes(((4, 3),)).pictures
    whole.put_all([pixels])
    parts.put(pixels, slot=0)
    for count in (PARTS - 3, PARTS, 1, PARTS + 2):
        parts.encode([0], [0], [count])
    assert whole.features.values[:12].any()
    assert torch.equal(parts.features.values, whole.features.values)


def answer_on_a_rank(group: ProcessGroup, folder: Path) -> list[float]:
    stepper = ImageStepper(folder, PlainKernels(deterministic=True), group=group)
    prompt = prompt_of_sizes(SIZES)
    stepper.put_all(prompt.pictures)
    return [float(each) for each in stepper.run(stepper.admission_of(0, prompt)).top_logprobs]


def test_two_ranks_answer_as_one(tmp_path: Path, saved: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = saved
    alone = answer_on_a_rank(ProcessGroup.single(), folder)
    # Only the first rank samples.
    first, _ = run_ranks(tmp_path, 2, answer_on_a_rank, folder)
    assert first == pytest.approx(alone, abs=1e-4)


def test_older_files_have_the_fields_of_the_text_outside(tmp_path: Path) -> None:
    model = save_tiny_qwen(tmp_path, "qwen2_vl")
    config = model.config.to_dict()
    text, vision = config.pop("text_config"), config["vision_config"]
    rope = text.pop("rope_parameters")
    sections = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    own = {"rope_theta": rope["rope_theta"], "rope_scaling": sections}
    vision["in_chans"] = vision.pop("in_channels")
    edit_json(
        tmp_path / "config.json",
        **(text | own | {"vision_config": vision, "text_config": None, "model_type": "qwen2_vl"}),
    )
    stepper = ImageStepper(tmp_path, make_kernels("plain", deterministic=True))
    prompt = prompt_of_sizes(SIZES)
    stepper.put_all(prompt.pictures)
    result = stepper.run(stepper.admission_of(0, prompt))
    assert result.ids.tolist() == [int(prompt.logits(model, spec_of(tmp_path))[-1].argmax())]


@pytest.mark.usefixtures("as_on_cuda")
def test_a_device_that_is_not_waited_for_computes_the_same(
    saved: tuple[Path, PreTrainedModel],
) -> None:
    folder, model = saved
    stepper = ImageStepper(folder, make_kernels("plain", deterministic=True))
    prompt = prompt_of_sizes(SIZES)
    stepper.put_all(prompt.pictures)
    for _ in range(2):
        is_running = len(stepper.batch) > 0
        result = stepper.decode([0]) if is_running else stepper.run(stepper.admission_of(0, prompt))
        best = int(prompt.logits(model, spec_of(folder))[-1].argmax())
        assert result.ids.tolist() == [best]
        prompt.ids.append(best)
        if best == IMAGE_TOKEN:
            break


def test_grids_outside_of_their_prompt_fail_their_sequence(
    saved: tuple[Path, PreTrainedModel],
) -> None:
    stepper = ImageStepper(saved[0], make_kernels("plain", deterministic=True))
    (sequence,) = stepper.admission_of(0, prompt_of_sizes(SIZES)).change.admitted
    with pytest.raises(StepInvalid, match="grids that overlap or lie outside"):
        stepper.batch.images.check(replace(sequence, image_grids=(ImageGrid(2, 9, 9),)))


@pytest.mark.parametrize(
    ("file", "fields", "words"),
    [
        ("preprocessor_config.json", {"patch_size": 14}, "patch_size=14 is not the encoder's 4"),
        ("preprocessor_config.json", {"size": {"height": 3}}, "None pixels are not a size"),
        ("config.json", {"vision_config": {"hidden_act": "mish"}}, "hidden_act='mish'"),
        ("config.json", {"vision_config": {"temporal_patch_size": 1}}, "temporal_patch_size 2"),
    ],
)
def test_files_that_cannot_be_are_refused(
    tmp_path: Path, file: str, fields: dict[str, object], words: str
) -> None:
    save_tiny_qwen(tmp_path, "qwen2_vl")
    edit_json(tmp_path / file, **fields)
    with pytest.raises(UnsupportedModel, match=words):
        read_vision(tmp_path)
