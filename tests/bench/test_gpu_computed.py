"""What is said of GPUs without one: computed times of models, and the plan of a first run."""

from __future__ import annotations

import pytest
import torch
from bench.gpu import computed, dry_run
from bench.gpu.computed import AFTER, BEFORE, GPUS, LLAMA_8B, MODELS, decode_seconds, prompt_seconds
from bench.gpu.engine.measure import decode_bytes, prefill_flops
from bench.gpu.engine.scale import LLAMA_8B as SHAPE
from bench.gpu.engine.scale import SCALES
from bench.gpu.plan import STAGES, TOTAL_SECONDS, Stage
from bench.harness.paths import ROOT
from transformers import AutoModelForCausalLM, DeepseekV2Config

pytest.importorskip("triton", reason="no Triton for this platform")

import triton
import triton.language as tl

READING = {
    "H100": (6.0, 7.7, 47, 220),
    "A100": (9.8, 12.7, 128, 595),
    "L4": (63, 83, 520, 2300),
    "4090": (18, 23.5, 215, 1020),
}
"""Llama 3.1 8B in the second reading of the CUDA path, ms: decodes of 1 and of 32 rows, prompts of 2k and of 8k."""


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_computed_times_fit_the_reading_and_exceed_the_data_sheet(gpu: computed.Gpu) -> None:
    decodes = [decode_seconds(LLAMA_8B, gpu, rows, BEFORE) for rows in (1, 32)]
    prompts = [prompt_seconds(LLAMA_8B, gpu, tokens, BEFORE) for tokens in (2048, 8192)]
    for seconds, expected in zip((*decodes, *prompts), READING[gpu.name], strict=True):
        assert seconds * 1e3 == pytest.approx(expected, rel=0.08)
    for rows, seconds in zip((1, 32), decodes, strict=True):
        assert seconds > decode_bytes(SHAPE, rows * computed.CONTEXT) / gpu.peak.bandwidth
    for tokens, seconds in zip((2048, 8192), prompts, strict=True):
        assert seconds > prefill_flops(SHAPE, [tokens]) / gpu.peak.rate


def test_weights_that_do_not_fit_have_no_times() -> None:
    cells = {
        (model.name, gpu.name): computed.cell(model, gpu, computed.CASES[0])
        for model in MODELS
        for gpu in GPUS
    }
    assert cells["Qwen3-30B-A3B", "L4"] == cells["70B on 4 GPUs", "4090"] == "no room"
    # Packed experts of 13 GB, which were 42 GB.
    assert cells["gpt-oss-20b", "L4"].startswith("no room → ")
    by_name = {model.name: model for model in MODELS}
    bytes_of = [by_name["gpt-oss-20b"].num_bytes(time) for time in (BEFORE, AFTER)]
    assert bytes_of[0] > 40e9
    assert bytes_of[1] < 16e9


def test_latents_and_fp8_are_counted_as_transformers_and_data_sheets_do() -> None:
    by_name = {model.name: model for model in MODELS}
    lite, coded = by_name["DeepSeek-V2-Lite"], by_name["8B, FP8"]
    assert lite.latents is not None
    assert lite.experts is not None
    config = DeepseekV2Config(
        hidden_size=lite.hidden,
        num_hidden_layers=lite.layers,
        num_attention_heads=lite.heads,
        num_key_value_heads=lite.heads,
        kv_lora_rank=lite.latents.latent,
        q_lora_rank=None,
        qk_rope_head_dim=lite.latents.rotated,
        qk_nope_head_dim=lite.latents.key,
        v_head_dim=lite.latents.value,
        n_routed_experts=lite.experts.count,
        n_shared_experts=lite.experts.shared,
        num_experts_per_tok=lite.experts.top_k,
        moe_intermediate_size=lite.experts.inter,
        first_k_dense_replace=0,
        vocab_size=lite.vocab,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    num_bytes = sum(each.nbytes for each in model.parameters())
    assert lite.num_bytes(AFTER) == pytest.approx(num_bytes, rel=1e-3)
    for gpu in GPUS[:2]:
        assert decode_seconds(lite, gpu, 32, AFTER) > 0.9 * num_bytes / gpu.peak.bandwidth
    for gpu in GPUS:
        reached = decode_seconds(coded, gpu, 1, AFTER)
        assert decode_seconds(LLAMA_8B, gpu, 1, AFTER) / 2 < reached
        assert reached <= decode_seconds(coded, gpu, 1, BEFORE)
        # The tensor cores' peak for e4m3 is twice the one for bfloat16, which the A100 has only.
        most = 2 if gpu.has_e4m3 else 1
        assert prompt_seconds(coded, gpu, 8192, AFTER) > prefill_flops(SHAPE, [8192]) / (
            most * gpu.peak.rate
        )
    assert [gpu.name for gpu in GPUS if not gpu.has_e4m3] == ["A100"]


def test_the_published_table_is_what_the_command_computes() -> None:
    assert computed.table() in (ROOT / "bench" / "RESULTS.md").read_text()


@triton.jit  # type: ignore[untyped-decorator]
def _noted(x, count, size: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x + tl.arange(0, size), count)


def test_a_launch_is_what_triton_would_compile_for_it() -> None:
    x = torch.zeros(64)
    with dry_run.launches_noted() as noted:
        for count in (1, 16, 32, 17, 33):
            _noted[(1,)](x, count, size=16)
        _noted[(2,)](x, 17, size=16)
        _noted[(1,)](x, 17, size=32)
        _noted[(1,)](x[1:], 17, size=16)
        _noted[(1,)](x.half(), 17, size=16)
    # 1, multiples of 16, others; then another size, alignment and dtype.
    assert sorted(noted.values()) == [1, 1, 1, 1, 2, 3]
    assert not x.any()


def test_kernels_are_compiled_by_all_cores_at_once() -> None:
    kernels = [("other", (("size", size),)) for size in range(32)]
    one, many = (dry_run.compiling_seconds(kernels, cores) for cores in (1, 16))
    each = dry_run.OTHER_KERNEL + dry_run.LAUNCHER_SECONDS
    assert one == pytest.approx(32 * each)
    assert many == pytest.approx(3 * each)
    assert dry_run.compiling_seconds([], 16) == 0


def test_the_plan_names_every_stage_and_those_that_take_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    found = [dry_run.Estimate(stage, 0, 0.0, 1.0) for stage in STAGES]
    monkeypatch.setattr(dry_run, "estimates", lambda _: found)
    assert dry_run.main(SCALES["tiny"], said.append) == 0
    assert all(f"| {stage.name} " in said[0] for stage in STAGES)
    late = Stage("checks.late", "Is it late?", 5, 5)
    found.append(dry_run.Estimate(late, 3, 4.0, TOTAL_SECONDS))
    assert dry_run.main(SCALES["tiny"], said.append) == 1
    assert said[-1] == "longer than their limits: late"


def test_every_kernel_of_the_checks_is_compiled_before_they_run() -> None:
    found = {each.stage.name: each for each in dry_run.estimates(SCALES["tiny"])}
    assert list(found) == [stage.name for stage in STAGES]
    assert found["compilation"].kernels > 30
    assert all(each.working > 0 for each in found.values())
    assert found["agreement"].kernels == found["bits"].kernels == 0
