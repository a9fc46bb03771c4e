from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, GPT2LMHeadModel

from millrace_shard.errors import UnsupportedModel, WeightsError
from millrace_shard.models.interface import KVLayer
from millrace_shard.models.transformers_backend import supported, transformers_model
from millrace_shard.models.transformers_backend.paged_attention import NAME, attending
from millrace_shard.models.transformers_backend.supported import (
    SUPPORTED,
    ShapeProbe,
    check_supported,
)
from millrace_shard.weights.read_ahead import ReadAhead
from millrace_shard.weights.unmapped_tensors import TensorUnmapper
from millrace_testing.engines.kernels import KERNELS, make_kernels
from millrace_testing.models.models import (
    VOCAB,
    Driver,
    Run,
    assert_generates_as,
    edit_json,
    greedy,
    logprobs,
    prompt_of,
    read_driver,
    save_tiny,
)

CPU = torch.device("cpu")
NUM_TOKENS = 5


def load(
    folder: Path,
    *,
    max_total_tokens: int | None = None,
    name: str = "plain",
    deterministic: bool = False,
) -> Driver:
    kernels = make_kernels(name, deterministic=deterministic)
    return read_driver(folder, kernels, max_total_tokens=max_total_tokens)


VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in SUPPORTED},
    "gpt2-scaling": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
    ),
    "gpt2-upcast": (
        "gpt2",
        {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt_bigcode-many-kv-heads": ("gpt_bigcode", {"multi_query": False}),
    "gpt_neox-sequential": (
        "gpt_neox",
        {"use_parallel_residual": False, "tie_word_embeddings": True},
    ),
    "opt-galactica": ("opt", {"enable_bias": False, "activation_function": "gelu"}),
    "phi-head-norms": ("phi", {"qk_layernorm": True, "num_key_value_heads": 4}),
    "opt-post-norm": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "starcoder2-full": ("starcoder2", {"sliding_window": None}),
}


PROMPTS = [prompt_of(length, seed=length) for length in (4, 70, 17)]


@dataclass(frozen=True)
class Checkpoint:
    """One of VARIATIONS, and what transformers generates with it for PROMPTS."""

    folder: Path
    expected: list[tuple[list[int], Tensor]]


@pytest.fixture(scope="module", params=VARIATIONS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    model_type, overrides = VARIATIONS[request.param]
    folder = tmp_path_factory.mktemp("model")
    reference = save_tiny(folder, model_type, **overrides)
    return Checkpoint(folder, [greedy(reference, prompt, NUM_TOKENS) for prompt in PROMPTS])


@pytest.mark.parametrize("kernels", KERNELS)
def test_greedy_output_equals_generate(checkpoint: Checkpoint, kernels: str) -> None:
    for chunk in (None, 7):
        runs = load(checkpoint.folder, name=kernels).generate(PROMPTS, NUM_TOKENS, chunk=chunk)
        for prompt, run, (tokens, probabilities) in zip(
            PROMPTS, runs, checkpoint.expected, strict=True
        ):
            assert run.ids[len(prompt) :] == tokens
            torch.testing.assert_close(logprobs(run), probabilities, atol=1e-4, rtol=0)


def test_the_two_parts_of_a_pass_are_the_whole(checkpoint: Checkpoint) -> None:
    whole, parted = load(checkpoint.folder), load(checkpoint.folder)
    rows = [(Run(prompt_of(length, seed=length)), length) for length in (30, 4)]
    batch = replace(whole.admit(rows), logit_rows=torch.arange(3, 34))
    expected = whole.model.forward(batch, whole.cache)
    batch = replace(
        parted.admit([(Run(run.ids), n) for run, n in rows]), logit_rows=batch.logit_rows
    )
    states = parted.model.states(batch, parted.cache)
    assert torch.equal(parted.model.logits(states), expected)
    torch.testing.assert_close(parted.model.logits(states[5:9]), expected[5:9], atol=1e-5, rtol=0)
    # Standing in for the class's decoder leaves nothing behind.
    run = whole.generate([prompt_of(5)], 1)[0]
    assert parted.generate([prompt_of(5)], 1)[0].ids == run.ids


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("gpt2", {"n_inner": 331}),
        ("starcoder2", {"intermediate_size": 331}),
    ],
    ids=["gpt2", "starcoder2"],
)
def test_invariant_stand_ins_compute_the_tokens_of_the_class(
    model_type: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    reference = save_tiny(tmp_path, model_type, **overrides)
    driver = load(tmp_path, deterministic=True)
    assert driver.model.info.batch_invariant
    prompts = [prompt_of(length, seed=length) for length in (4, 70)]
    assert_generates_as(reference, prompts, driver.generate(prompts, NUM_TOKENS))


def test_invariance_is_not_claimed_without_deterministic_kernels(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt2")
    assert not load(tmp_path).model.info.batch_invariant


def test_invariance_is_not_claimed_for_a_class_that_multiplies_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model_type, is_invariant in {"arcee": True, "flex_olmo": False}.items():
        save_tiny(tmp_path / model_type, model_type)
        monkeypatch.setattr(supported, "SUPPORTED", (model_type,))
        model = load(tmp_path / model_type, deterministic=True).model
        assert model.info.batch_invariant is is_invariant


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5, 2.6, 2.9],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 9.0, 12.0, 14.0, 15.0],
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
}


@pytest.mark.parametrize(("length", "max_total_tokens"), [(24, None), (40, 64)])
def test_longrope_does_not_follow_the_longest_sequence_of_the_batch(
    length: int, max_total_tokens: int | None, tmp_path: Path
) -> None:
    reference = save_tiny(tmp_path, "starcoder2", rope_parameters=LONGROPE)
    prompt = prompt_of(length)
    driver = load(tmp_path, max_total_tokens=max_total_tokens)
    run, _ = driver.generate([prompt, prompt_of(50, seed=9)], NUM_TOKENS)
    assert_generates_as(reference, [prompt], [run])


def test_shapes_come_from_the_model_not_from_its_config(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt_neox", num_key_value_heads=1)
    assert load(tmp_path).model.geometry.layers == (KVLayer(4, 16),) * 2
    save_tiny(tmp_path / "one", "gpt_bigcode")
    assert load(tmp_path / "one").model.geometry.layers == (KVLayer(1, 16),) * 2


def test_the_window_is_reported_when_all_layers_have_it(tmp_path: Path) -> None:
    windows = {"starcoder2": 12, "gpt2": None}
    for model_type, window in windows.items():
        save_tiny(tmp_path / model_type, model_type)
        info = load(tmp_path / model_type).model.info
        assert (info.model_type, info.window_size, info.vocab_size) == (model_type, window, VOCAB)


def test_windows_that_contradict_the_config_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "starcoder2")
    edit_json(tmp_path / "config.json", layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(UnsupportedModel, match=r"layer_types\[1\]='full_attention'.*window 12"):
        load(tmp_path)


@pytest.mark.parametrize("model_type", ["bloom", "gpt_oss", "deepseek_v3", "gptj", "falcon", "mpt"])
def test_other_architectures_are_refused_with_the_list(model_type: str) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        check_supported(AutoConfig.for_model(model_type))
    assert repr(model_type) in str(refusal.value)
    assert all(name in str(refusal.value) for name in SUPPORTED)


def test_classes_run_eagerly_until_a_gpu_has_shown_that_they_are_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(transformers_model.CAPTURED) <= set(SUPPORTED)
    save_tiny(tmp_path, "gpt2")
    monkeypatch.setattr(transformers_model, "CAPTURED", ("opt",))
    assert not load(tmp_path).model.info.capturable
    monkeypatch.setattr(transformers_model, "CAPTURED", ("opt", "gpt2"))
    assert load(tmp_path).model.info.capturable


def test_the_progress_of_loading_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("millrace_shard.weights.read_ahead.INTERVAL_SECONDS", 0.0)
    save_tiny(tmp_path, "gpt2", n_embd=512)
    with caplog.at_level(logging.INFO):
        driver = load(tmp_path)
    told = [r.message for r in caplog.records if r.name == "millrace_shard.weights.read_ahead"]
    size = (tmp_path / "model.safetensors").stat().st_size
    assert told[-1] == f"loaded {size / 1e6:.0f} MB of {size / 1e6:.0f} MB"
    assert len(told) > 2 * len(driver.model.geometry.layers)


def test_tied_tensors_stay_tied_and_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The head shares a tensor with the embeddings, as on a GPU, where the model is moved first."""
    monkeypatch.setattr("millrace_shard.weights.read_ahead.INTERVAL_SECONDS", 0.0)
    save_tiny(tmp_path, "gpt2", n_embd=512)
    files = [tmp_path / "model.safetensors"]
    model = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float32)
    with ReadAhead(files) as ahead, caplog.at_level(logging.INFO):
        unmapper = TensorUnmapper(model, files, torch.device("cpu"), ahead)
        unmapper.unmap_rest()
        told = [r.message for r in caplog.records]
        place = model.lm_head.weight.data_ptr()
        assert place == model.transformer.wte.weight.data_ptr()
        unmapper.unmap_rest()
        with unmapper.releasing(model.lm_head.weight.detach()):
            assert unmapper.is_unmapped(model.lm_head.weight)
    assert model.lm_head.weight.data_ptr() == place
    assert [r.message for r in caplog.records] == told
    size = told[-1].split()
    assert size[1:3] == size[-2:]


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "stablelm")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.down_proj\.weight is missing"):
        load(tmp_path)


def test_a_tensor_of_another_shape_is_an_error(tmp_path: Path) -> None:
    save_tiny(tmp_path, "stablelm")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        load(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt2")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(WeightsError, match=r"model\.safetensors is damaged or incomplete"):
        load(tmp_path)


class Layer(nn.Module):
    """A module that knows its number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_idx = 0


def attend(**arguments: object) -> None:
    shape = (1, 2, 3, 8)
    q, k, v = torch.ones(shape), torch.ones(shape), torch.ones(shape)
    with attending(ShapeProbe()):
        AttentionInterface()[NAME](Layer(), q, k, v, None, **arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"s_aux": torch.zeros(2)}, "s_aux"),
        ({"position_bias": torch.zeros(2)}, "position_bias"),
        ({"is_causal": False}, "is_causal=False"),
    ],
)
def test_attention_that_the_kernels_lack_is_refused(
    arguments: dict[str, object], named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        attend(**arguments)


def test_arguments_without_effect_are_accepted() -> None:
    attend(s_aux=None, dropout=0.0, is_causal=True, use_cache=False, softcap=None)


@pytest.mark.parametrize(
    ("queries", "keys", "values"), [((4, 8), (2, 8), (2, 6)), ((3, 8), (2, 8), (2, 8))]
)
def test_shapes_without_a_cache_are_refused(
    queries: tuple[int, int], keys: tuple[int, int], values: tuple[int, int]
) -> None:
    q, k, v = (torch.ones(1, heads, 3, dim) for heads, dim in (queries, keys, values))
    with pytest.raises(UnsupportedModel, match="is not supported"), attending(ShapeProbe()):
        AttentionInterface()[NAME](Layer(), q, k, v, None)
