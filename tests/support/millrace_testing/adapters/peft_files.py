"""Adapters that PEFT itself makes and saves, for tiny models of `transformers`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from millrace_router.request.adapter import AdapterModule

VOCABULARY = 40


def tiny_llama() -> Any:
    """Two layers, 16 wide, with fewer heads of keys than of queries."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def tiny_gpt2() -> Any:
    """Its linear layers are of the class Conv1D."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2))


def modules_of(model: Any) -> list[AdapterModule]:
    """The linear layers of a model, from the layers themselves."""
    found = []
    for name, layer in model.named_modules():
        weight: Any = getattr(layer, "weight", None)
        if type(layer).__name__ == "Conv1D":
            inputs, outputs = weight.shape
        elif isinstance(layer, torch.nn.Linear):
            outputs, inputs = weight.shape
        else:
            continue
        found.append(AdapterModule(name=name, inputs=inputs, outputs=outputs, bytes_per_slice=1))
    return found


@contextmanager
def as_of_peft() -> Iterator[None]:
    """Ignore PEFT's warnings about deprecated functions and about patterns."""
    with warnings.catch_warnings():
        for category in (FutureWarning, UserWarning, RuntimeWarning):
            warnings.simplefilter("ignore", category)
        yield


def random_adapter(model: Any, *, seed: int = 0, name: str = "default", **fields: Any) -> Any:
    """Add an adapter with random A, B and biases to a plain model or to one of PEFT's."""
    config = LoraConfig(**{"task_type": "CAUSAL_LM", **fields})
    with as_of_peft():
        if hasattr(model, "peft_config"):
            model.add_adapter(name, config)
        else:
            model = get_peft_model(model, config, adapter_name=name)
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if f".{name}." in key:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def save_adapter(folder: Path, *, model: Any = None, **fields: Any) -> Any:
    """Save a random adapter as PEFT does, and return PEFT's model."""
    adapted = random_adapter(tiny_llama() if model is None else model, **fields)
    with as_of_peft():
        adapted.save_pretrained(str(folder))
    return adapted


def deltas(model: Any, name: str = "default") -> Mapping[str, torch.Tensor]:
    """PEFT's own change of each weight, [outputs, inputs]."""
    found = {}
    for key, layer in model.base_model.model.named_modules():
        if name in getattr(layer, "lora_A", ()):
            delta = layer.get_delta_weight(name).detach().float()
            found[key] = delta.T if layer.fan_in_fan_out else delta
    return found


def canonical_deltas(path: Path) -> Mapping[str, torch.Tensor]:
    """The change of each weight by a canonical file, [outputs, inputs]; read by the format's own library."""
    from safetensors.torch import load_file

    tensors = load_file(str(path))
    names = {key.removesuffix(".lora_A") for key in tensors if key.endswith(".lora_A")}
    return {
        name: (tensors[f"{name}.lora_B"].float() * tensors[f"{name}.scales"])
        @ tensors[f"{name}.lora_A"].float()
        for name in names
    }
