"""Adapters of every architecture against `transformers` with PEFT in float32, and against PEFT's merged weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from millrace_shard.errors import AdapterInvalid
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.models.adapters import (
    AdaptedModel,
    load_adapted,
    make_adapter,
    merged,
    write_canonical,
    write_file,
)
from millrace_testing.models.models import (
    CONFIGS,
    Run,
    assert_scores_as,
    prompt_of,
    save_tiny,
)

REFUSED_BY_PEFT = ("falcon_h1", "mamba", "falcon_mamba", "mamba2", "nemotron_h")
"""Classes whose `out_proj` it does not adapt."""
LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear")
OTHER_NAMES = ("nemotron_h", "kimi_linear")
"""Classes whose modules have other names than in files."""
NUM_TOKENS = 4
LENGTHS = (5, 41, 18, 7)
PROMPTS = [prompt_of(length, seed=length) for length in LENGTHS]


def projections(model: PreTrainedModel) -> list[str]:
    """The last names of all plain projections but the head, each once."""
    names = [
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if type(module) in {nn.Linear, Conv1D, FalconLinear}
    ]
    return [name for name in dict.fromkeys(names) if name not in {"lm_head", "embed_out"}]


def scores_of(model: nn.Module, run: Run, prompt: Sequence[int]) -> Tensor:
    """The log probabilities at each generated token, by one pass over the whole sequence."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([run.ids[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].float().log_softmax(-1)


def assert_equal_to(
    adapted: AdaptedModel,
    oracles: Sequence[nn.Module],
    *,
    chunk: int | None = None,
) -> None:
    """Row i has adapter i modulo their number + 1, where the first of `oracles` is the base."""
    slots = [i % len(oracles) for i in range(len(PROMPTS))]
    runs = adapted.driver.generate(PROMPTS, NUM_TOKENS, chunk=chunk, adapters=slots)
    for run, slot, prompt in zip(runs, slots, PROMPTS, strict=True):
        assert_scores_as(oracles[slot], [prompt], [run])


@dataclass
class Bench:
    """A checkpoint with some adapters in a cache folder."""

    folder: Path
    cache: Path
    base: PreTrainedModel

    @classmethod
    def make(cls, root: Path, model_type: str, **overrides: Any) -> Bench:
        return cls(
            root / "model", root / "cache", save_tiny(root / "model", model_type, **overrides)
        )

    def check(
        self, *adapters: PeftModel, kernels: str = "plain", deterministic: bool = False
    ) -> AdaptedModel:
        """Compare whole and chunked prompts with PEFT and with its merged weights."""
        made, names = make_kernels(kernels, deterministic=deterministic), None
        if self.base.config.model_type in OTHER_NAMES:
            parts = load_adapted(self.folder, self.cache, made).store.table.parts
            names = {part.name for part in parts}
        digests = [write_canonical(each, self.cache, modules_of_base=names) for each in adapters]
        adapted = load_adapted(self.folder, self.cache, made, digests=digests)
        assert_equal_to(adapted, [self.base, *adapters])
        assert_equal_to(adapted, [self.base, *map(merged, adapters)], chunk=7)
        return adapted


@pytest.mark.parametrize("kernels", ["cpu", pytest.param("plain", marks=pytest.mark.long)])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_adapters_of_all_projections_match_peft(
    model_type: str, kernels: str, tmp_path: Path
) -> None:
    bench = Bench.make(tmp_path, model_type)
    # PEFT takes names of projections in these classes for names of its stacked experts, too.
    has_experts = model_type in {
        "ernie4_5_moe",
        "glm4_moe",
        "hunyuan_v1_moe",
        "nemotron_h",
        "qwen3_next",
        *LATENTS,
    }
    stacked = {"gate_proj", "up_proj", "down_proj"} if has_experts else set()
    # What makes keys and values of latents, routers that are linears of the class, and what PEFT refuses.
    left_out = stacked | ({"kv_b_proj"} if model_type in LATENTS else {"wg", "layer"})
    left_out |= {"out_proj"} if model_type in REFUSED_BY_PEFT else set()
    # Its class reads the weight by itself.
    left_out |= {"dt_proj"} if model_type in {"mamba", "falcon_mamba"} else set()
    targets = [name for name in projections(bench.base) if name not in left_out]
    adapters = [
        make_adapter(bench.base, seed=1, r=4, lora_alpha=8, target_modules=targets),
        make_adapter(bench.base, seed=2, r=17, lora_alpha=9, target_modules=targets),
    ]
    bench.check(*adapters, kernels=kernels, deterministic=kernels == "cpu")


def test_adapters_of_what_makes_latents_of_experts_match_peft(tmp_path: Path) -> None:
    bench = Bench.make(tmp_path, "nemotron_h", moe_latent_size=24)
    targets = ["fc1_latent_proj", "fc2_latent_proj"]
    adapters = [make_adapter(bench.base, seed=seed, target_modules=targets) for seed in (1, 2)]
    bench.check(*adapters, kernels="cpu", deterministic=True)


def test_what_makes_keys_and_values_of_latents_is_not_a_module_of_adapters(tmp_path: Path) -> None:
    bench = Bench.make(tmp_path, "deepseek_v3")
    digest = write_canonical(make_adapter(bench.base, target_modules=["kv_b_proj"]), bench.cache)
    made = make_kernels("plain", deterministic=False)
    with pytest.raises(AdapterInvalid, match=r"self_attn\.kv_b_proj is not a part of the model"):
        load_adapted(bench.folder, bench.cache, made, digests=[digest])


@pytest.mark.parametrize(
    "name", ["experts", "experts.3.gate_proj", "experts.base_layer", "gate", "shared_expert"]
)
def test_experts_and_routers_are_not_modules_of_adapters(name: str, tmp_path: Path) -> None:
    bench = Bench.make(tmp_path, "qwen2_moe")
    module = f"model.layers.1.mlp.{name}"
    tensors = {
        f"{module}.lora_A": torch.ones(4, 64),
        f"{module}.lora_B": torch.ones(24, 4),
        f"{module}.scales": torch.ones(4),
    }
    facts = {"rank": 4, "inputs": 64, "outputs": 24, "bias": False}
    digest = write_file(bench.cache, tensors, {module: facts})
    made = make_kernels("plain", deterministic=False)
    with pytest.raises(AdapterInvalid, match=f"module {module} is not a part of the model"):
        load_adapted(bench.folder, bench.cache, made, digests=[digest])


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "phi3"])
def test_each_single_target_matches_peft(model_type: str, tmp_path: Path) -> None:
    bench = Bench.make(tmp_path, model_type)
    names = [*projections(bench.base), "lm_head"]
    adapters = [make_adapter(bench.base, seed=3, r=4, target_modules=[name]) for name in names]
    for first in range(0, len(adapters), 3):
        bench.check(*adapters[first : first + 3])


VARIATIONS: dict[str, dict[str, Any]] = {
    "patterns": {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 24, "layers.1.mlp.down_proj": 2},
        "alpha_pattern": {"q_proj": 12},
    },
    "rslora": {"r": 9, "lora_alpha": 6, "use_rslora": True, "target_modules": "all-linear"},
    "some-layers": {"r": 4, "target_modules": ["k_proj", "up_proj"], "layers_to_transform": [1]},
    "regular-expression": {
        "r": 4,
        "target_modules": r".*layers\.0\.(self_attn\.[qo]|mlp\.(gate|down))_proj",
    },
    "bias": {
        "r": 4,
        "lora_bias": True,
        "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "lm_head"],
    },
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_variations_of_the_adapter_config_match_peft(name: str, tmp_path: Path) -> None:
    bench = Bench.make(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    bench.check(make_adapter(bench.base, seed=4, **VARIATIONS[name]))


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_of_the_head_match_peft(tied: bool, tmp_path: Path) -> None:
    for model_type in ("llama", "gemma2"):
        bench = Bench.make(tmp_path / model_type, model_type, tie_word_embeddings=tied)
        targets = ["lm_head", "o_proj"]
        adapters = [make_adapter(bench.base, seed=n, r=4, target_modules=targets) for n in (5, 6)]
        with torch.no_grad():
            bench.check(*adapters)
