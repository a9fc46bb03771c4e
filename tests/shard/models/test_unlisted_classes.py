"""Classes of transformers that are not on the list: those that pass the check of their logits, and others."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, OlmoModel
from transformers.models.olmo.modeling_olmo import OlmoMLP

from millrace_shard.__main__ import main
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.cpu.int8_linear import with_int8
from millrace_shard.models.families.registry import FAMILIES
from millrace_shard.models.interface import KVLayer
from millrace_shard.models.transformers_backend import transformers_loader
from millrace_shard.models.transformers_backend.paged_attention import PagedAttention
from millrace_shard.models.transformers_backend.supported import SUPPORTED, check_supported
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.models.models import (
    UNLISTED,
    Driver,
    Run,
    assert_generates_as,
    greedy,
    logprobs,
    prompt_of,
    read_driver,
    save_tiny,
)
from millrace_testing.shards.ranks import Forked, run_ranks

PROMPTS = [prompt_of(length, seed=length) for length in (4, 70)]
NUM_TOKENS = 4
FAIL = ("camembert", "diffllama", "doge")
WITHOUT_PLAN = ("persimmon",)
WORK = [name for name in UNLISTED if name not in FAIL]
ON_RANKS = [name for name in WORK if name not in WITHOUT_PLAN]


def load(
    folder: Path,
    kernels: Kernels | None = None,
    *,
    group: ProcessGroup | None = None,
    dtype: torch.dtype = torch.float32,
    allow_unlisted: bool = True,
) -> Driver:
    kernels = kernels or make_kernels("plain", deterministic=False)
    return read_driver(folder, kernels, dtype=dtype, group=group, allow_unlisted=allow_unlisted)


@pytest.mark.parametrize("model_type", WORK)
def test_a_class_that_passes_generates_the_tokens_of_transformers(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert model_type not in (*FAMILIES, *SUPPORTED)
    reference = save_tiny(tmp_path, model_type)
    with caplog.at_level(logging.INFO):
        driver = load(tmp_path, make_kernels("cpu", deterministic=True))
    (told,) = (r.message for r in caplog.records if "self-check" in r.message)
    assert told.startswith(f"{model_type} passes the self-check in torch.float32: as a whole ")
    assert not driver.model.info.batch_invariant
    assert_generates_as(reference, PROMPTS, driver.generate(PROMPTS, NUM_TOKENS, chunk=9))


def test_the_served_dtype_is_checked_after_float32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "olmo")
    with caplog.at_level(logging.INFO):
        load(
            tmp_path,
            make_kernels("cpu", deterministic=True),
            dtype=torch.bfloat16,
        )
    told = [r.message for r in caplog.records if "self-check" in r.message]
    assert [each.split(":")[0].split()[-1] for each in told] == ["torch.float32", "torch.bfloat16"]


def test_int8_linears_pass_with_a_tolerance_of_their_own(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "olmo")
    kernels = with_int8(make_kernels("cpu", deterministic=True))
    run = load(tmp_path, kernels, dtype=torch.bfloat16).generate(PROMPTS[1:], 1)[0]
    expected = greedy(reference, PROMPTS[1], 1)[1]
    distance = (logprobs(run) - expected).square().mean().sqrt() / expected.std()
    assert 1e-3 < distance < 0.2


PACKED = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_up_proj": "packed_colwise",
    "layers.*.mlp.down_proj": "rowwise",
}


def on_a_rank(group: ProcessGroup, folder: Path) -> dict[str, list[Run]]:
    torch.set_num_threads(1)
    names = {name: folder / name for name in ON_RANKS}
    result = {
        name: load(each, group=group).generate(PROMPTS, NUM_TOKENS, chunk=9)
        for name, each in names.items()
    }
    CONFIG_MAPPING["glm"].base_model_tp_plan = PACKED
    packed = load(folder / "glm", group=group)
    assert packed.model.geometry.layers == (KVLayer(1, 16),) * 2
    return result | {"packed": packed.generate(PROMPTS, NUM_TOKENS, chunk=9)}


def test_two_ranks_generate_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Heads split and gathered, biases of the head, experts in both layouts, gates stacked in one linear."""
    references = {name: save_tiny(tmp_path / name, name) for name in ON_RANKS}
    first, second = run_ranks(tmp_path, 2, on_a_rank, tmp_path)
    for name, runs in first.items():
        assert_generates_as(references["glm" if name == "packed" else name], PROMPTS, runs)
        for run, other in zip(runs, second[name], strict=True):
            assert torch.equal(torch.stack(run.logits), torch.stack(other.logits))


def failure(folder: Path, **options: Any) -> str:
    with pytest.raises(UnsupportedModel) as failed:
        load(folder, **options)
    return str(failed.value)


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("diffllama", "layer 0 attends more than once"),
        ("doge", "attention with attention_mask is not supported"),
    ],
)
def test_attention_that_only_a_loaded_model_shows_is_refused(
    model_type: str, text: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, model_type)
    assert failure(tmp_path) == text


def test_a_class_that_counts_positions_from_its_padding_fails_the_check(tmp_path: Path) -> None:
    save_tiny(tmp_path, "camembert")
    text = failure(tmp_path)
    assert text.startswith(
        "camembert fails the self-check in torch.float32: logits of 24 tokens computed as a whole over the paged cache"
    )
    assert text.endswith("of their spread; at most 0.001 is allowed")


def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention whose scores are too small."""
    attend = PagedAttention.__call__

    def wrong(self: Any, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Any) -> Tensor:
        return attend(self, layer, q / 2, k, v, rule)

    monkeypatch.setattr(PagedAttention, "__call__", wrong)


def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that ignores positions: relative ones are right within a step, but not across chunks."""
    forward = OlmoModel.forward

    def wrong(self: Any, *args: Any, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        del position_ids
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(OlmoModel, "forward", wrong)


def shifting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that mixes neighbouring tokens outside its attention."""
    forward = OlmoMLP.forward

    def wrong(self: Any, x: Tensor) -> Any:
        return forward(self, x + x.roll(1, dims=1))

    monkeypatch.setattr(OlmoMLP, "forward", wrong)


@dataclass(frozen=True)
class Broken:
    """What is wrong with a class, and the comparison that shows it."""

    patch: Callable[[pytest.MonkeyPatch], None]
    shown: str


BROKEN = {
    "scaled": Broken(scaled, "as a whole"),
    "counting": Broken(counting, "in chunks"),
    "shifting": Broken(shifting, "as a whole"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_check_names_the_comparison_that_fails(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "olmo")
    BROKEN[name].patch(monkeypatch)
    assert f"24 tokens computed {BROKEN[name].shown} over" in failure(tmp_path)


@pytest.mark.parametrize("name", ["scaled", "counting"])
def test_a_check_in_only_bfloat16_detects_a_broken_class(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large checkpoint has no copy in float32."""
    save_tiny(tmp_path, "olmo")
    monkeypatch.setattr(transformers_loader, "SMALL_BYTES", 0)
    kernels = make_kernels("cpu", deterministic=True)
    load(tmp_path, kernels, dtype=torch.bfloat16)
    BROKEN[name].patch(monkeypatch)
    text = failure(tmp_path, kernels=kernels, dtype=torch.bfloat16)
    assert f"in torch.bfloat16: logits of 24 tokens computed {BROKEN[name].shown}" in text


def broken_on_a_rank(group: ProcessGroup, folder: Path) -> str:
    with pytest.MonkeyPatch.context() as monkeypatch:
        scaled(monkeypatch)
        return failure(folder, group=group)


def test_all_ranks_end_when_the_check_fails(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "olmo")
    first, second = run_ranks(tmp_path, 2, broken_on_a_rank, tmp_path / "model")
    assert "its own eager attention's by" in first
    assert "its own eager attention's;" in second


REFUSED = {
    "mamba": "MambaForCausalLM has layers of type 'linear_attention'; only full_attention and sliding_attention",
    "llama4_text": "has layers of type 'chunked_attention'",
    "lfm3": "has layers of type 'conv'",
    "recurrent_gemma": "RecurrentGemmaForCausalLM has",
    "deepseek_v3": "DeepseekV3ForCausalLM has latent attention (MLA)",
    "bart": "BartForCausalLM",
    "gpt_oss": "attention with s_aux is not supported",
    "xmod": "XmodForCausalLM does not run on paged attention: Input language unknown",
    "gemma4_text": "has layers whose fields differ",
    "t5": "t5 has an encoder and a decoder; only models of one decoder are served",
    "clip": "clip is not a decoder: transformers has no causal LM class for it",
    **dict.fromkeys(
        ("codegen", "gpt_neo"),
        "does not use the attention interface of transformers",
    ),
    "bert": "attention with is_causal=False is not supported",
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_classes_without_a_fitting_cache_are_refused_before_weights_are_read(
    model_type: str,
) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        check_supported(AutoConfig.for_model(model_type), allow_unlisted=True)
    assert REFUSED[model_type] in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "model_type", "text"),
    [
        ((), "olmo", "model_type 'olmo' is not supported; .*; --allow-unlisted-model tries other"),
        ((), "camembert", "model_type 'camembert' is not supported; .*; it only encodes; .*"),
        (("--allow-unlisted-model",), "camembert", "camembert fails the self-check in .* 0.001"),
    ],
)
def test_the_shard_ends_with_one_line(
    flags: tuple[str, ...], model_type: str, text: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "model", model_type)
    arguments = ["serve", str(tmp_path / "model"), f"--uds-path={tmp_path}/shard", "--device=cpu"]
    shard = Forked(main, [*arguments, "--cpu-threads=1", "--disable-custom-kernels", *flags])
    try:
        output = shard.communicate(timeout=100)
    finally:
        shard.end()
    assert shard.returncode == 1
    (told,) = (line for line in output.splitlines() if line.startswith("Error: "))
    assert re.match(f"Error: {text}", told)
    assert "Traceback" not in output
