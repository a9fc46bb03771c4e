"""Tensors of a checkpoint that contradict its config are refused, reported, or used as transformers uses them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import WeightsError
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.models.description import ModelDescription
from millrace_shard.models.load import load_model
from millrace_shard.models.quantized import code_formats
from millrace_testing.models.models import CPU, VOCAB, Driver, edit_json, prompt_of, save_tiny
from millrace_testing.quantized.linears import FORMATS

HIDDEN = 64
LAYER = "model.layers.1."


def change(folder: Path, changes: dict[str, Tensor]) -> None:
    """Add tensors to the file of a checkpoint, or replace them."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | changes, path, metadata={"format": "pt"})


def logits(folder: Path) -> Tensor:
    kernels = PlainKernels(deterministic=True)
    model = load_model(
        folder, dtype=torch.float32, kernels=kernels, group=ProcessGroup.single(), device=CPU
    )
    return Driver(model, kernels, dtype=torch.float32).generate([prompt_of(9)], 1)[0].logits[0]


def of_transformers(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found: Tensor = model(torch.tensor([prompt_of(9)])).logits[0, -1]
    return found


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", f"{LAYER}self_attn.q_proj.bias"),
        ("qwen2", f"{LAYER}self_attn.o_proj.bias"),
        ("mistral", f"{LAYER}mlp.down_proj.bias"),
        ("cohere", f"{LAYER}input_layernorm.bias"),
        ("cohere", "model.norm.bias"),
        ("phi3", "lm_head.bias"),
        ("qwen3_moe", f"{LAYER}mlp.experts.3.up_proj.bias"),
        ("qwen3_moe", f"{LAYER}mlp.gate.e_score_correction_bias"),
    ],
)
def test_a_bias_that_the_config_denies_is_refused_before_weights_are_read_unless_it_is_0(
    family: str, name: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, family)
    plain = logits(tmp_path)
    change(tmp_path, {name: torch.zeros(HIDDEN)})
    assert torch.equal(logits(tmp_path), plain)
    wrong = {"model.embed_tokens.weight": torch.zeros(1, 1)}
    change(tmp_path, {name: torch.eye(HIDDEN)[3], **wrong})
    with pytest.raises(WeightsError) as refusal:
        logits(tmp_path)
    assert str(refusal.value) == (
        f"tensor {name} in model.safetensors is a bias, and by its config the model has none there"
    )


def test_scales_of_inputs_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    change(tmp_path, {f"{LAYER}mlp.up_proj.input_scale": torch.ones(())})
    logits(tmp_path)
    change(tmp_path, {f"{LAYER}mlp.up_proj.pre_quant_scale": torch.ones(HIDDEN)})
    with pytest.raises(WeightsError, match=r"up_proj\.pre_quant_scale in .* scales the inputs"):
        logits(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_biases_that_one_rank_adds_are_read_by_all(rank: int, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    kernels = PlainKernels(deterministic=True)
    group = ProcessGroup(rank, 2, CPU)
    load_model(tmp_path, dtype=torch.float32, kernels=kernels, group=group, device=CPU)


def test_other_tensors_of_layers_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "glm4_moe", use_qk_norm=True)
    change(tmp_path, {f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(8)})
    logits(tmp_path)
    assert not caplog.records
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"use_qk_norm": true', '"use_qk_norm": false'))
    with caplog.at_level(logging.WARNING):
        logits(tmp_path)
    (record,) = caplog.records
    assert record.message.startswith(
        "8 tensors of the checkpoint are not used, since its config does not name them: "
        "model.layers.0.self_attn.k_norm.weight, model.layers.0.self_attn.q_norm.weight, "
    )


HEADS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "equal": (lambda embedding: embedding.clone(), False),
    "another": (lambda embedding: embedding.flip(0).contiguous(), True),
    "last-row": (
        lambda embedding: embedding + torch.eye(VOCAB, HIDDEN).flip(0) * 0.5,
        True,
    ),
}


@pytest.mark.parametrize("head", HEADS)
def test_a_tied_head_that_the_file_has_in_another_form_is_used_as_in_transformers(
    head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    make, is_told = HEADS[head]
    change(tmp_path, {"lm_head.weight": make(embedding)})
    with caplog.at_level(logging.WARNING, "millrace_shard"):
        found = logits(tmp_path)
    assert any("another head" in record.message for record in caplog.records) is is_told
    torch.testing.assert_close(found, of_transformers(tmp_path), atol=1e-4, rtol=0)


QUANTIZED_HEADS = {
    "int-quantized": "it is used",
    "float-quantized": "it is used",
    "pack-quantized": "it is used",
    "ignored": "it is not used, since config.json does not say how it is quantised",
}


@pytest.mark.parametrize("method", QUANTIZED_HEADS)
def test_a_quantised_head_with_a_tied_embedding_is_reported(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers uses one in int8 and fails on the others; it is asked for a head of the same numbers."""
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    is_used = method != "ignored"
    head = FORMATS[method if is_used else "pack-quantized"]
    packed, values = head.pack(VOCAB, HIDDEN, torch.Generator().manual_seed(3))
    if is_used:
        change(tmp_path, {"lm_head.weight": values})
    expected = of_transformers(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    tensors |= {f"lm_head.{kind}": tensor for kind, tensor in packed.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    groups = {"group_0": head.config["config_groups"]["group_0"] | {"targets": ["re:.*lm_head"]}}
    config = {**head.config, "config_groups": groups, "ignore": [] if is_used else ["lm_head"]}
    edit_json(tmp_path / "config.json", quantization_config=config)
    with caplog.at_level(logging.WARNING, "millrace_shard"):
        found = logits(tmp_path)
    (message,) = (record.message for record in caplog.records if "another head" in record.message)
    assert message.endswith(f"the file has another head: {QUANTIZED_HEADS[method]}")
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    spec = ModelDescription.read(tmp_path).spec
    assert spec is not None
    formats = code_formats(tmp_path, spec, quantize=None, rank=0, world_size=1)
    assert len(formats) == is_used
