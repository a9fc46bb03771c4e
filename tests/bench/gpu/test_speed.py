"""The stages of speed at a tiny size: every figure comes, and what it is divided by is right."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch
from bench.gpu import goals
from bench.gpu.checks import versions
from bench.gpu.engine.measure import decode_bytes, decode_flops, prefill_flops
from bench.gpu.engine.profile import Event, activity_of
from bench.gpu.engine.random_weights import read_description
from bench.gpu.engine.scale import LLAMA_8B, SCALES, TINY
from bench.gpu.engine.session import BadStepError, load, start
from bench.gpu.figures import Figure
from bench.gpu.setting import Setting
from bench.gpu.speed import decode, prefill, small
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache

from millrace_shard.config import ShardConfig

CPU = torch.device("cpu")
SCALE = SCALES["tiny"]
LIMIT_SECONDS = 300.0
PLAIN = "--disable-custom-kernels"


def figures_of(stage: object, tmp_path: Path) -> list[Figure]:
    """On plain torch, which is faster than the interpreter."""
    found: list[Figure] = []
    setting = Setting(CPU, SCALE, tmp_path, time.monotonic() + LIMIT_SECONDS, (PLAIN,))
    stage.run(setting, found.append)  # type: ignore[attr-defined]
    return found


def peer(tmp_path: Path) -> torch.nn.Module:
    config = read_description(tmp_path, TINY)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="eager"
    )
    return model.eval()


def test_decodes_of_every_batch_and_a_whole_load_are_measured(tmp_path: Path) -> None:
    *decodes, engine = [f for f in figures_of(decode, tmp_path) if f.kind != goals.ACTIVITY]
    decodes = [figure for figure in decodes if figure.kind == goals.DECODE]
    assert [figure.detail["rows"] for figure in decodes] == list(SCALE.batches)
    assert engine.kind == goals.ENGINE
    for figure in (*decodes, engine):
        assert math.isfinite(figure.value)
        assert figure.value > 0
    # Earlier batches decode the same sequences: the first one is by now the longest.
    first = SCALE.context + SCALE.num_warm_ups + SCALE.num_steps / 2
    assert decodes[0].detail["bytes"] == decode_bytes(TINY, first)
    second = first + SCALE.num_warm_ups + SCALE.num_steps
    assert decodes[1].detail["bytes"] == decode_bytes(TINY, first + second)


def test_prefill_and_the_small_model_are_measured(tmp_path: Path) -> None:
    (figure,) = figures_of(prefill, tmp_path)
    rows, length = SCALE.prefill
    assert (figure.kind, figure.detail["flops"]) == (
        goals.PREFILL,
        prefill_flops(TINY, [length] * rows),
    )
    found = figures_of(small, tmp_path)
    assert [figure.kind for figure in found] == [goals.SMALL] * len(SCALE.small_contexts)


def test_the_machines_versions_and_limits_are_found(tmp_path: Path) -> None:
    figures = figures_of(versions, tmp_path)
    assert figures[0].detail["torch"] == torch.__version__
    found = goals.Figures(figures)
    assert found.bandwidth is not None
    assert found.bandwidth > 1e8
    assert found.matrix_rate is not None
    assert found.matrix_rate > 1e8


def test_the_idle_share_is_the_time_in_which_no_work_runs() -> None:
    events = [
        Event("kernel", True, 10, 20),
        # Two that begin within the one before, the first of which ends first.
        Event("kernel", True, 12, 15),
        Event("kernel", True, 16, 25),
        Event("Memcpy HtoD", True, 30, 40),
        Event("cudaLaunchKernelExC", False, 0, 1),
        Event("cuLaunchKernel", False, 1, 2),
        Event("cudaGraphLaunch", False, 2, 3),
        Event("cudaEventSynchronize", False, 3, 4),
        Event("aten::add", False, 0, 100),
    ]
    found = activity_of(events, 2)
    assert found is not None
    assert found.pop("idle") == pytest.approx(1 / 6)
    assert found == {"launches": 1.5, "copies": 0.5, "waits": 0.5}
    assert activity_of(events[4:], 2) is None


def test_the_bytes_of_a_step_are_those_of_the_model_and_its_cache(tmp_path: Path) -> None:
    model = peer(tmp_path)
    weights = sum(p.nbytes for name, p in model.named_parameters() if "norm" not in name)
    cache = DynamicCache()
    with torch.inference_mode():
        model(torch.ones(3, 7, dtype=torch.int64), past_key_values=cache)
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert decode_bytes(TINY, 3 * 7) == weights + stored


def test_the_operations_of_a_prefill_are_those_that_torch_counts(tmp_path: Path) -> None:
    model = peer(tmp_path)
    rows, length = 2, 12
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(torch.ones(rows, length, dtype=torch.int64), logits_to_keep=1)
    # The counter sees whole squares of attention, of which a causal one has length + 1 in 2 * length.
    squares = 4 * TINY.num_layers * TINY.hidden_size * rows * length**2
    causal = squares * (length + 1) / (2 * length)
    assert prefill_flops(TINY, [length] * rows) == counter.get_total_flops() - squares + causal
    assert decode_flops(TINY, rows, rows * 1) == prefill_flops(TINY, [1] * rows)


def test_the_large_model_has_the_size_of_its_name() -> None:
    # Head and embedding are one here; apart they make the 8.03 B of the released model.
    parameters = decode_bytes(LLAMA_8B, 0) / 2
    assert parameters + LLAMA_8B.vocab_size * LLAMA_8B.hidden_size == pytest.approx(
        8.03e9, rel=1e-3
    )


def test_a_step_that_yields_no_numbers_is_no_figure(tmp_path: Path) -> None:
    config = ShardConfig.from_args([PLAIN, "--device=cpu", str(tmp_path)])
    loaded = load(TINY, config, CPU, SCALE.max_tokens)
    session = start(loaded, SCALE, max_rows=1, graphs=None)
    session.admit(1, 4, room=2)
    session.decode(1, 1)
    assert session.context(1) == 5
    with torch.inference_mode():
        vars(loaded.model)["_norm"].weight.fill_(float("nan"))
    with pytest.raises(BadStepError, match=r"\[0\]"):
        session.decode(1, 1)


def test_a_server_gets_the_defaults_of_the_shard(tmp_path: Path) -> None:
    setting = Setting(CPU, SCALE, tmp_path, time.monotonic())
    given = ShardConfig.from_args([*setting.flags, "folder"])
    default = ShardConfig.from_args(["folder"])
    assert given.cuda_graphs == default.cuda_graphs
    assert given.model_dump(exclude={"device"}) == default.model_dump(exclude={"device"})
