"""Kernels are checked for the shapes of the attention that the model then computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.base import LayerCache, Linear
from millrace_shard.kernels.lora.adapter_table import LoraSite
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.models.description import ModelDescription
from millrace_shard.models.families.registry import FAMILIES
from millrace_shard.models.load import load_model
from millrace_testing.models.models import CONFIGS, CPU, Driver, prompt_of, save_tiny


class Recording(PlainKernels):
    """Plain kernels that keep the shapes they meet."""

    def __init__(self) -> None:
        super().__init__(deterministic=False)
        self.attended: set[tuple[int, int, int]] = set()
        self.kinds: set[tuple[int | None, float | None]] = set()
        self.weights: list[tuple[int, ...]] = []
        self.head_weights: list[tuple[int, ...]] = []

    def attend(self, queries: Tensor, batch: RaggedBatch, cache: LayerCache, **rule: Any) -> Tensor:
        self.attended.add((queries.shape[1], *cache.keys.shape[2:]))
        self.kinds.add((rule.get("window"), rule.get("softcap")))
        return super().attend(queries, batch, cache, **rule)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        self.weights.append(tuple(weight.shape))
        return super().linear(weight, bias)

    def head(self, weight: Tensor, lora: LoraSite | None = None) -> Linear:
        head = super().head(weight, lora)
        self.head_weights.append(self.weights.pop())
        return head


def record(folder: Path) -> Recording:
    kernels = Recording()
    model = load_model(
        folder,
        dtype=torch.float32,
        kernels=kernels,
        group=ProcessGroup.single(),
        device=CPU,
        max_total_tokens=None,
    )
    Driver(model, kernels, dtype=torch.float32, device=CPU).generate([prompt_of(5, seed=0)], 1)
    return kernels


@pytest.mark.parametrize("model_type", CONFIGS)
def test_it_is_what_the_model_attends_with(model_type: str, tmp_path: Path) -> None:
    # Configs of these classes have no groups of heads.
    ungrouped: dict[str, Any] = (
        {"num_key_value_heads": 4} if model_type in {"gpt_neox", "opt"} else {}
    )
    save_tiny(tmp_path, model_type, **ungrouped)
    shape, found = ModelDescription.read(tmp_path).layer_shape(1), record(tmp_path)
    assert found.attended == {(shape.num_heads, shape.num_kv_heads, shape.head_dim)}
    assert found.kinds == set(shape.kinds)
    if model_type in FAMILIES:
        assert set(found.weights) == set(shape.linears)
        assert found.head_weights == [shape.head]


def test_windows_may_differ_by_layer(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    save_tiny(tmp_path, "qwen2", use_sliding_window=True, sliding_window=9, layer_types=kinds)
    assert set(ModelDescription.read(tmp_path).layer_shape(1).kinds) == {(9, None), (None, None)}
    assert record(tmp_path).kinds == {(9, None), (None, None)}


def test_it_is_one_ranks_part(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    shape = ModelDescription.read(tmp_path).layer_shape(4)
    # The two key-value heads are held twice each.
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (1, 1, 16)
    assert set(shape.linears) == {(48, 64), (64, 16), (40, 64), (64, 20)}
    assert shape.head == (50, 64)
    with pytest.raises(UnsupportedModel, match="3 shards"):
        ModelDescription.read(tmp_path).layer_shape(3)
