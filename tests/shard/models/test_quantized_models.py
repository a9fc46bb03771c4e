"""Models with quantised linears, against transformers' models with the numbers that the codes stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from millrace_shard.commands import chosen_kernels
from millrace_shard.config import ShardConfig
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import Kernels, Linear
from millrace_shard.kernels.layer_shape import CodedLinears, LayerShape
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.quantized import CodeFormat, QuantizedTensor
from millrace_shard.models.description import ModelDescription
from millrace_shard.models.quantized import code_formats, coded_linears, named_linears
from millrace_shard.models.spec import DecoderSpec, ExpertsSpec
from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_shard.weights.quantized.made_at_load import METHODS
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.models.gguf_files import TinyGguf
from millrace_testing.models.models import (
    CPU,
    Run,
    assert_scores_as,
    edit_json,
    logprobs,
    prompt_of,
    read_driver,
    read_model,
    save_tiny,
)
from millrace_testing.quantized.checkpoints import save_mixed, save_quantized
from millrace_testing.quantized.linears import FORMATS
from millrace_testing.shards.ranks import run_ranks

PROMPTS = [prompt_of(length, seed=length) for length in (5, 40)]
NUM_TOKENS = 3
SCATTERED = ("gptq-desc-act", "pack-quantized-actorder")
SHARED = [name for name in FORMATS if name not in SCATTERED]


def generate(
    folder: Path,
    group: ProcessGroup | None = None,
    dtype: torch.dtype = torch.float32,
    kernels: Kernels | None = None,
) -> list[Run]:
    with torch.inference_mode():
        driver = read_driver(folder, kernels, dtype=dtype, group=group)
        return driver.generate(PROMPTS, NUM_TOKENS, chunk=16)


def generate_on_a_rank(group: ProcessGroup, folders: list[Path]) -> list[list[Run]]:
    torch.set_num_threads(1)
    return [generate(folder, group) for folder in folders]


@pytest.mark.parametrize("name", FORMATS)
def test_logits_match_transformers(name: str, tmp_path: Path) -> None:
    assert_scores_as(save_quantized(tmp_path, "llama", name), PROMPTS, generate(tmp_path))


@pytest.mark.parametrize("name", FORMATS)
def test_bfloat16_rounds_each_number_once(name: str, tmp_path: Path) -> None:
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    save_quantized(quantized, "qwen3", name).save_pretrained(plain)
    found, expected = (
        [logprobs(run) for run in generate(folder, dtype=torch.bfloat16)]
        for folder in (quantized, plain)
    )
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", ["gptq", "awq", "float-quantized-block", "nf4", "int-quantized"])
def test_compiled_kernels_compute_the_same_weights(name: str, tmp_path: Path) -> None:
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    save_quantized(quantized, "llama", name).save_pretrained(plain)
    kernels = make_kernels("cpu", deterministic=True)
    found, expected = (
        logprobs(generate(folder, dtype=torch.bfloat16, kernels=kernels)[1])[0]
        for folder in (quantized, plain)
    )
    # Codes may be multiplied without being rounded to bfloat16 first.
    torch.testing.assert_close(found, expected, atol=0.3, rtol=0)
    assert (found - expected).square().mean().sqrt() < 0.05


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma3_text"])
def test_quantised_models_of_other_families_match_transformers(family: str, tmp_path: Path) -> None:
    assert_scores_as(save_quantized(tmp_path, family, "gptq"), PROMPTS, generate(tmp_path))


@pytest.mark.parametrize("name", ["awq", "gptq", "pack-quantized", "fp8-block", "nf4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_quantised_experts_match_transformers(family: str, name: str, tmp_path: Path) -> None:
    reference = save_quantized(tmp_path, family, name, moe_intermediate_size=64)
    assert_scores_as(reference, PROMPTS, generate(tmp_path))


def test_quantised_experts_over_latents_match_transformers(tmp_path: Path) -> None:
    four = FORMATS["pack-quantized"]
    group = four.config["config_groups"]["group_0"]
    targets = ["re:.*latent_proj$", r"re:.*\.experts\..*"]
    config = {**four.config, "config_groups": {"group_0": {**group, "targets": targets}}}
    formats = {"latent_proj": four, ".experts.": four}
    sizes = {"moe_latent_size": 64, "moe_intermediate_size": 64}
    reference = save_mixed(tmp_path, "nemotron_h", formats, config, **sizes)
    assert_scores_as(reference, PROMPTS, generate(tmp_path))


def test_ranks_share_every_format(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in SHARED]
    references = [
        save_quantized(folder, "phi3" if index % 3 == 0 else "llama", folder.name)
        for index, folder in enumerate(folders)
    ]
    for runs in run_ranks(tmp_path, 2, generate_on_a_rank, folders):
        for reference, each in zip(references, runs, strict=True):
            assert_scores_as(reference, PROMPTS, each)


def test_groups_of_modules_have_their_own_formats(tmp_path: Path) -> None:
    four, eight = (FORMATS[name] for name in ("pack-quantized", "float-quantized"))
    config = {
        **four.config,
        "format": "mixed-precision",
        "config_groups": {
            "rest": {**four.config["config_groups"]["group_0"], "format": "pack-quantized"},
            "down": {
                **eight.config["config_groups"]["group_0"],
                "format": "float-quantized",
                "targets": ["re:.*down_proj$"],
            },
        },
        "ignore": ["lm_head", "re:.*layers.0.self_attn.*", "model.layers.1.mlp.up_proj"],
    }
    formats = {"layers.0.self_attn": None, "1.mlp.up_proj": None, "down_proj": eight, "": four}
    assert_scores_as(save_mixed(tmp_path, "llama", formats, config), PROMPTS, generate(tmp_path))


def test_overrides_of_gptq_match_transformers(tmp_path: Path) -> None:
    config = {
        **FORMATS["gptq"].config,
        "dynamic": {"-:.*self_attn.*": {}, r"+:.*\.down_proj": {"bits": 8}},
    }
    formats = {"self_attn": None, "down_proj": FORMATS["gptq-8-bits"], "": FORMATS["gptq"]}
    assert_scores_as(save_mixed(tmp_path, "llama", formats, config), PROMPTS, generate(tmp_path))


def test_overrides_of_auto_round_are_applied(tmp_path: Path) -> None:
    config = {
        **FORMATS["auto-round-gptq"].config,
        "extra_config": {
            "model.layers.1.self_attn.q_proj": {"bits": 16},
            "model.layers.0.mlp.down_proj": {"bits": 8},
        },
    }
    formats = {
        "1.self_attn.q_proj": None,
        "0.mlp.down_proj": FORMATS["gptq-8-bits"],
        "": FORMATS["gptq"],
    }
    assert_scores_as(save_mixed(tmp_path, "llama", formats, config), PROMPTS, generate(tmp_path))


@pytest.mark.parametrize("name", ["gptq", "awq", "pack-quantized-8-bits", "fp8-block", "nf4"])
@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens"])
def test_vocabularies_may_be_quantized(name: str, module: str, tmp_path: Path) -> None:
    config = {key: value for key, value in FORMATS[name].config.items() if key != "ignore"}
    found = save_quantized(
        tmp_path, "llama", name, config={**config, "lm_head": True}, vocab_size=200
    )
    quantize_module(tmp_path, found, name, module)
    if "config_groups" in config:
        group = {**config["config_groups"]["group_0"], "targets": ["Linear", "Embedding"]}
        edit_json(
            tmp_path / "config.json",
            quantization_config={**config, "config_groups": {"group_0": group}},
        )
    assert_scores_as(found, PROMPTS, generate(tmp_path))
    for runs in run_ranks(tmp_path, 2, generate_on_a_rank, [tmp_path]):
        assert_scores_as(found, PROMPTS, runs[0])


def quantize_module(folder: Path, reference: PreTrainedModel, name: str, module: str) -> None:
    path = folder / "model.safetensors"
    tensors: dict[str, Tensor] = load_file(path)
    outputs, inputs = tensors.pop(f"{module}.weight").shape
    packed, values = FORMATS[name].pack(outputs, inputs, torch.Generator().manual_seed(6))
    with torch.no_grad():
        reference.get_parameter(f"{module}.weight").copy_(values)
    save_file(tensors | {f"{module}.{k}": v for k, v in packed.items()}, path, {"format": "pt"})


NUM_CODES = {method: {256} for method in METHODS}
NUM_CODES |= {"int4": {16, 256}, "bitsandbytes-nf4": {16}, "bitsandbytes-fp4": {16}}


class Recording(PlainKernels):
    """Plain kernels that keep the formats of codes they meet."""

    def __init__(self) -> None:
        super().__init__(deterministic=False)
        self.formats: set[CodeFormat] = set()

    def linear_from(self, weights: LinearWeights) -> Linear:
        self._keep(weights)
        return super().linear_from(weights)

    def head_from(self, weights: LinearWeights) -> Linear:
        self._keep(weights)
        return super().head_from(weights)

    def _keep(self, weights: LinearWeights) -> None:
        for part in weights.weight.parts:
            if isinstance(part, QuantizedTensor):
                self.formats.add(CodeFormat.of(part))


def loaded(
    folder: Path, quantize: str | None = None, group: ProcessGroup | None = None
) -> set[CodeFormat]:
    """The formats of the linears and the head of the model."""
    kernels = Recording()
    read_model(folder, kernels, group=group, quantize=quantize)
    return kernels.formats


def found(
    folder: Path, quantize: str | None = None, rank: int = 0, world_size: int = 1
) -> set[CodeFormat]:
    spec = ModelDescription.read(folder).spec
    assert spec is not None
    formats = code_formats(folder, spec, quantize=quantize, rank=rank, world_size=world_size)
    assert len(set(formats)) == len(formats)
    return set(formats)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_checkpoints_match_the_loaded_weights(name: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, "llama", name, num_hidden_layers=1)
    formats = found(tmp_path)
    assert formats
    assert formats == loaded(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_have_groups_of_their_own(rank: int, tmp_path: Path) -> None:
    """64 of 128 inputs end inside a group of 48."""
    save_quantized(tmp_path, "llama", "fp8-block", num_hidden_layers=1)
    formats = found(tmp_path, rank=rank, world_size=2)
    assert {each.group_size for each in formats} == {48, None} if rank == 0 else {48, 16}
    assert formats == loaded(tmp_path, group=ProcessGroup(rank, 2, CPU))


def test_formats_of_single_modules_match_the_loaded_weights(tmp_path: Path) -> None:
    parts = {"q_proj": FORMATS["pack-quantized"], "down_proj": FORMATS["int-quantized"], "": None}
    groups = {
        f"group_{number}": {
            **made.config["config_groups"]["group_0"],
            "targets": [f"re:.*{part}"],
            "format": made.config["format"],
        }
        for number, (part, made) in enumerate(parts.items())
        if made is not None
    }
    config = {**FORMATS["int-quantized"].config, "config_groups": groups}
    save_mixed(tmp_path, "llama", parts, config)
    assert len(found(tmp_path)) == 2
    assert found(tmp_path) == loaded(tmp_path)


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q4_K", "Q6_K"])
def test_formats_of_gguf_files_match_the_loaded_weights(kind: str, tmp_path: Path) -> None:
    made = TinyGguf("llama", kind, num_hidden_layers=1)
    folder = prepare_gguf(made.write(tmp_path / "m.gguf"), tmp_path, tokenizer=None)
    assert len(found(folder)) == (kind != "F16")
    assert found(folder) == loaded(folder)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tied", [False, True])
def test_formats_of_weights_quantised_at_load_match_the_loaded_weights(
    method: str, tied: bool, tmp_path: Path
) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=tied)
    formats = found(tmp_path, method)
    assert {len(each.values) for each in formats} == NUM_CODES[method]
    assert formats == loaded(tmp_path, method)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ["gptq", "pack-quantized-8-bits", "fp8-block"])
def test_all_linears_of_a_rank_but_the_head_are_counted(
    name: str, world_size: int, tmp_path: Path
) -> None:
    save_quantized(tmp_path, "llama", name)
    spec = ModelDescription.read(tmp_path).spec
    assert spec is not None
    coded = coded_linears(tmp_path, spec, quantize=None, rank=0, world_size=world_size)
    assert weights_in(coded) * world_size == linear_weights(spec)
    assert {each.format for each in coded} <= found(tmp_path, world_size=world_size)


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_linears_that_become_codes_at_load_are_counted(method: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    spec = ModelDescription.read(tmp_path).spec
    assert spec is not None
    coded = coded_linears(tmp_path, spec, quantize=method, rank=0, world_size=1)
    assert weights_in(coded) == linear_weights(spec)
    assert {len(each.format.values) for each in coded} == {256 if method == "int8" else 16}


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_count_as_often_as_a_token_has_them(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family)
    if family == "gpt_oss":
        edit_json(tmp_path / "config.json", quantization_config={"quant_method": "mxfp4"})
    spec = ModelDescription.read(tmp_path).spec
    assert spec is not None
    quantize = None if family == "gpt_oss" else "int4"
    coded = coded_linears(tmp_path, spec, quantize=quantize, rank=0, world_size=1)
    mixtures = [each.feed_forward for each in spec.layers]
    experts = sum(
        3 * spec.hidden_size * each.intermediate_size * each.router.rule.top_k
        for each in mixtures
        if isinstance(each, ExpertsSpec)
    )
    attention = 0 if family == "gpt_oss" else linear_weights(spec)
    assert experts
    assert weights_in(coded) == attention + experts


def weights_in(coded: tuple[CodedLinears, ...]) -> int:
    return sum(each.inputs * each.outputs for each in coded)


def linear_weights(spec: DecoderSpec) -> int:
    """The weights of all linears but the head and routed experts."""
    return sum(each.inputs * each.outputs for each in named_linears(spec)[:-1])


@pytest.mark.parametrize("family", ["qwen2_moe", "phi3"])
def test_plain_weights_have_no_code_formats(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family)
    assert found(tmp_path) == set()


def test_kernels_for_cuda_are_checked_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_quantized(tmp_path, "llama", "awq")
    shapes = list[LayerShape]()
    disabled = list[tuple[str, ...]]()

    def choose(*_: Any, shapes: tuple[LayerShape, ...], **flags: Any) -> Kernels:
        disabled.append(flags["disabled"])
        kept.extend(shapes)
        return PlainKernels(deterministic=True)

    kept = shapes
    monkeypatch.setattr(chosen_kernels, "choose_kernels", choose)
    config = ShardConfig.from_args([str(tmp_path)])
    for device in (torch.device("cuda"), CPU):
        chosen_kernels.chosen_kernels(config, device, torch.bfloat16, ProcessGroup.single())
    on_cuda, on_cpu = shapes
    assert set(on_cuda.formats) == loaded(tmp_path)
    assert on_cpu.formats == ()
    config = ShardConfig.from_args([str(tmp_path), "--quantize-activations=exact"])
    chosen_kernels.chosen_kernels(config, CPU, torch.bfloat16, ProcessGroup.single())
    assert disabled == [(), (), ("scaled_mm",)]
