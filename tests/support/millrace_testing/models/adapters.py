"""Random adapters made by PEFT for tiny models, and their canonical files."""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace_router.adapters.fetching.canonical import base_module
from millrace_shard.adapters.adapter_store import AdapterStore
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.kernels.plain import PlainKernels
from millrace_testing.models.models import Driver, Run, read_model

CPU = torch.device("cpu")
MAX_ADAPTERS = 8
PREFIX = "base_model.model."


def make_adapter(base: PreTrainedModel, *, seed: int = 0, **config: Any) -> PeftModel:
    """A copy of `base` with an adapter of `LoraConfig(**config)`, whose weights change the output a lot."""
    base = copy.deepcopy(base)
    # PEFT renames nothing in the class, but warns of tied embeddings and of settings that it corrects.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                size = parameter.shape[-1] if parameter.ndim > 1 else 1
                parameter.copy_(noise * (0.7 / size**0.5))
    return adapted.eval()


def merged(adapted: PeftModel) -> PreTrainedModel:
    """A copy with PEFT's merged weights; a tied head is untied, as its delta is none of the embeddings'."""
    adapted = copy.deepcopy(adapted)
    head = adapted.get_output_embeddings()
    if isinstance(head, LoraLayer):
        head = head.get_base_layer()
    head.weight = nn.Parameter(head.weight.detach().clone())
    if head.bias is None:
        # PEFT merges a bias only into another one.
        head.bias = nn.Parameter(torch.zeros(len(head.weight)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole: PreTrainedModel = adapted.merge_and_unload()
    return whole.eval()


def write_canonical(
    adapted: PeftModel,
    cache: Path,
    dtype: torch.dtype = torch.float32,
    modules_of_base: Collection[str] | None = None,
) -> str:
    """Write the canonical file of an adapter below `cache`, with A and B in `dtype`; returns its digest.

    Modules have the names of `modules_of_base`, as the router finds them, or those of the class.
    """
    tensors: dict[str, Tensor] = {}
    modules: dict[str, dict[str, Any]] = {}
    for path, layer in adapted.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        name = path.removeprefix(PREFIX)
        if modules_of_base is not None:
            name = base_module(name, modules_of_base) or name
        a, b = layer.lora_A["default"].weight.detach(), layer.lora_B["default"]
        scale, rank = layer.scaling["default"], len(a)
        tensors[f"{name}.lora_A"] = a.to(dtype)
        tensors[f"{name}.lora_B"] = b.weight.detach().to(dtype)
        tensors[f"{name}.scales"] = torch.full((rank,), scale)
        if b.bias is not None:
            tensors[f"{name}.bias"] = b.bias.detach() * scale
        modules[name] = {
            "rank": rank,
            "inputs": a.shape[1],
            "outputs": b.weight.shape[0],
            "bias": b.bias is not None,
        }
    return write_file(cache, tensors, modules)


def write_file(cache: Path, tensors: dict[str, Tensor], modules: dict[str, dict[str, Any]]) -> str:
    """Write a canonical file of these tensors; returns its digest."""
    metadata = {"format": "millrace-adapter-1", "modules": json.dumps(modules, sort_keys=True)}
    content = save({name: tensors[name].contiguous() for name in sorted(tensors)}, metadata)
    digest = hashlib.sha256(content).hexdigest()
    folder = cache / digest
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter.safetensors").write_bytes(content)
    return digest


@dataclass
class AdaptedModel:
    """A loaded model whose slots hold the adapters of a cache folder."""

    driver: Driver
    store: AdapterStore
    slots: dict[str, int] = field(default_factory=dict)
    """By digest."""

    def put(self, slot: int, digest: str) -> None:
        """Load an adapter into `slot`."""
        self.store.put(slot, self.store.read(slot, digest))
        self.slots[digest] = slot


def load_adapted(
    folder: Path,
    cache: Path,
    kernels: Kernels,
    *,
    digests: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    group: ProcessGroup | None = None,
) -> AdaptedModel:
    """The model in `folder` with the adapters `digests` in slots 1, 2, …"""
    table = AdapterTable(CPU)
    model = read_model(folder, kernels, dtype=dtype, group=group, adapters=table)
    store = AdapterStore(table, cache, dtype)
    store.resize(MAX_ADAPTERS, 1 << 12)
    adapted = AdaptedModel(Driver(model, kernels, dtype=dtype), store)
    for slot, digest in enumerate(digests, 1):
        adapted.put(slot, digest)
    return adapted


@dataclass(frozen=True)
class AdaptedJob:
    """The work of every rank: prompts with their adapter slots, over a checkpoint and a cache folder."""

    folder: Path
    cache: Path
    digests: tuple[str, ...]
    prompts: list[list[int]]
    slots: list[int]
    num_tokens: int
    chunk: int | None = None


def generate_on_a_rank(group: ProcessGroup, jobs: list[AdaptedJob]) -> list[list[Run]]:
    """The sequences of each job."""
    kernels = PlainKernels(deterministic=True)
    found = []
    for job in jobs:
        with torch.inference_mode():
            adapted = load_adapted(job.folder, job.cache, kernels, digests=job.digests, group=group)
            found.append(
                adapted.driver.generate(
                    job.prompts, job.num_tokens, chunk=job.chunk, adapters=job.slots
                )
            )
    return found
