from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import ModelError, UnsupportedModel, WeightsError
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.models.interface import CausalModel, KVLayer
from millrace_shard.models.load import load_model
from millrace_shard.models.rope import RopeOverride
from millrace_testing.models.models import (
    VOCAB,
    Driver,
    edit_json,
    greedy,
    logprobs,
    prompt_of,
    save_tiny,
)

CPU = torch.device("cpu")


def load(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    kernels: PlainKernels | None = None,
    group: ProcessGroup | None = None,
    rope_override: RopeOverride | None = None,
) -> CausalModel:
    return load_model(
        folder,
        dtype=dtype,
        kernels=kernels or PlainKernels(deterministic=False),
        group=group or ProcessGroup.single(),
        device=CPU,
        rope_override=rope_override,
    )


def test_info_follows_the_config(tmp_path: Path) -> None:
    save_tiny(tmp_path, "mistral", sliding_window=9)
    model = load(tmp_path)
    assert model.info.model_type == "mistral"
    assert model.info.vocab_size == VOCAB
    assert model.info.max_position_embeddings == 256
    assert model.info.eos_token_ids == (2,)
    assert model.info.window_size == 9
    assert model.geometry.layers == (KVLayer(2, 16),) * 2


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (5, 2, (5,)),
        ([5, 7, 5], 2, (5, 7)),
        (None, 3, (3,)),
        (None, [3, 4], (3, 4)),
        (None, None, ()),
        ("absent", 3, (3,)),
    ],
)
def test_end_of_sequence_ids(
    generation: object, config: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    save_tiny(tmp_path, "qwen2")
    edit_json(tmp_path / "config.json", eos_token_id=config)
    if generation == "absent":
        (tmp_path / "generation_config.json").unlink()
    else:
        edit_json(tmp_path / "generation_config.json", eos_token_id=generation)
    assert load(tmp_path).info.eos_token_ids == expected


def test_an_end_of_sequence_that_is_not_an_id_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    edit_json(tmp_path / "generation_config.json", eos_token_id="</s>")
    with pytest.raises(ModelError, match="eos_token_id='</s>'"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
@pytest.mark.parametrize("own", [None, {"rope_type": "linear", "factor": 7.0, "rope_theta": 5e3}])
def test_rope_override_equals_a_checkpoint_made_so(
    kind: str, own: dict[str, Any] | None, tmp_path: Path
) -> None:
    theta = {"rope_theta": 5e3}
    made_so = {"rope_type": kind, "factor": 2.0} | theta
    reference = save_tiny(tmp_path, "llama", max_position_embeddings=32, rope_parameters=made_so)
    edit_json(tmp_path / "config.json", rope_parameters=own or {"rope_type": "default"} | theta)
    kernels = PlainKernels(deterministic=False)
    model = load(tmp_path, kernels=kernels, rope_override=RopeOverride(kind, 2.0))
    assert model.info.max_position_embeddings == 64
    prompt = prompt_of(30)
    run = Driver(model, kernels, dtype=torch.float32).generate([prompt], 6)[0]
    tokens, expected = greedy(reference, prompt, 6)
    assert run.ids[30:] == tokens
    torch.testing.assert_close(logprobs(run), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "override", "message"),
    [
        ("llama", ("yarn", 2.0), "'yarn' is not one of: linear, dynamic"),
        ("llama", ("linear", 0.5), "at least 1, not 0.5"),
        ("gpt2", ("linear", 2.0), "gpt2 has no rotary embedding"),
    ],
)
def test_rope_overrides_that_make_no_sense_are_refused(
    model_type: str, override: tuple[str, float], message: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, model_type)
    with pytest.raises(UnsupportedModel, match=message):
        load(tmp_path, rope_override=RopeOverride(*override))


def test_rope_override_reaches_the_transformers_backend(tmp_path: Path) -> None:
    made_so = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    reference = save_tiny(
        tmp_path, "starcoder2", max_position_embeddings=32, rope_parameters=made_so
    )
    edit_json(tmp_path / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    kernels = PlainKernels(deterministic=False)
    model = load(tmp_path, kernels=kernels, rope_override=RopeOverride("dynamic", 2.0))
    prompt = prompt_of(30)
    run = Driver(model, kernels, dtype=torch.float32).generate([prompt], 6)[0]
    assert run.ids[30:] == greedy(reference, prompt, 6)[0]


LEGACY: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 3.0},
    "dynamic": {"type": "dynamic", "factor": 3.0},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
}


@pytest.mark.parametrize("kind", LEGACY)
def test_older_names_of_rope_settings(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 500.0} | LEGACY[kind]
    reference = save_tiny(
        tmp_path, "llama", rope_parameters={k: v for k, v in rope.items() if k != "type"}
    )
    edit_json(
        tmp_path / "config.json", rope_parameters=None, rope_theta=500.0, rope_scaling=LEGACY[kind]
    )
    kernels = PlainKernels(deterministic=False)
    prompt = prompt_of(30)
    run = Driver(load(tmp_path, kernels=kernels), kernels, dtype=torch.float32).generate(
        [prompt], 6
    )[0]
    tokens, expected = greedy(reference, prompt, 6)
    assert run.ids[30:] == tokens
    torch.testing.assert_close(logprobs(run), expected, atol=1e-4, rtol=0)


def test_the_requested_dtype_is_computed_in(tmp_path: Path) -> None:
    for model_type in ("llama", "gpt2"):
        reference = save_tiny(tmp_path / model_type, model_type)
        kernels = PlainKernels(deterministic=False)
        model = load(tmp_path / model_type, dtype=torch.bfloat16, kernels=kernels)
        prompt = prompt_of(12)
        run = Driver(model, kernels, dtype=torch.bfloat16).generate([prompt], 1)[0]
        expected = greedy(reference, prompt, 1)[1]
        assert run.logits[0].dtype == torch.float32
        difference = (logprobs(run) - expected).abs().max()
        assert 1e-4 < difference < 0.5


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json in"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        pytest.param("[" * 100_000, "is not JSON: it has too many levels", id="deep"),
        ("{}", "model_type=None"),
        (
            '{"model_type": "nothing_known"}',
            "model_type='nothing_known' in .* these are served: llama, .*gpt2",
        ),
        ('{"model_type": "llama", "num_attention_heads": "four"}', "num_attention_heads='four'"),
        ('{"model_type": "gpt2", "n_embd": "wide"}', "is not a valid gpt2 config"),
        ('{"model_type": "bloom"}', "'bloom' is not supported; these are: llama, .*gpt2"),
    ],
)
def test_a_config_that_cannot_be_used(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_an_end_of_sequence_below_0_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    edit_json(tmp_path / "generation_config.json", eos_token_id=[2, -1])
    with pytest.raises(ModelError, match=r"eos_token_id=\[2, -1\] is neither"):
        load(tmp_path)


def test_an_impossible_split_is_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="3 shards cannot share 4 attention heads"):
        load(tmp_path, group=ProcessGroup(0, 3, CPU))
    with pytest.raises(WeightsError, match=r"no model\.safetensors"):
        load(tmp_path)


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    assert load(tmp_path).info.vocab_size == VOCAB
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(WeightsError, match=r"tensor lm_head\.weight is missing"):
        load(tmp_path)
