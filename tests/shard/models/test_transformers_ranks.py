"""Classes of transformers on two ranks, by the plan that the class and its config carry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.cpu.int8_linear import with_int8
from millrace_shard.models.description import ModelDescription
from millrace_shard.models.interface import KVLayer
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.models.models import (
    CPU,
    Driver,
    Run,
    assert_generates_as,
    greedy,
    logprobs,
    prompt_of,
    read_driver,
    save_tiny,
)
from millrace_testing.shards.ranks import run_ranks

PROMPTS = [prompt_of(length, seed=length) for length in (3, 41)]
NUM_TOKENS = 5
CHUNKS = (None, 8)
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4}),
    "gpt_neox-sequential-tied": (
        "gpt_neox",
        {"num_key_value_heads": 4, "use_parallel_residual": False, "tie_word_embeddings": True},
    ),
    "phi": ("phi", {}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-even-vocabulary": ("starcoder2", {"vocab_size": 200, "sliding_window": None}),
}


def load(
    group: ProcessGroup, folder: Path, kernels: Kernels, dtype: torch.dtype = torch.float32
) -> Driver:
    return read_driver(folder, kernels, dtype=dtype, group=group, allow_unlisted=True)


def generate_all(group: ProcessGroup, folder: Path) -> dict[tuple[str, int | None], Any]:
    """On one rank: the runs of each checkpoint and chunk, and the shapes of the rank's KV cache."""
    torch.set_num_threads(1)
    result: dict[tuple[str, int | None], Any] = {}
    for name in CHECKPOINTS:
        for chunk in CHUNKS:
            driver = load(group, folder / name, make_kernels("plain", deterministic=False))
            runs = driver.generate(PROMPTS, NUM_TOKENS, chunk=chunk)
            result[name, chunk] = runs, driver.model.geometry.layers
    return result


@dataclass(frozen=True)
class TwoRanks:
    """What the ranks computed, and the models of transformers."""

    folder: Path
    references: dict[str, PreTrainedModel]
    by_rank: list[dict[tuple[str, int | None], Any]]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    folder = tmp_path_factory.mktemp("ranks")
    references = {
        name: save_tiny(folder / name, model_type, **overrides)
        for name, (model_type, overrides) in CHECKPOINTS.items()
    }
    return TwoRanks(folder, references, run_ranks(folder, 2, generate_all, folder))


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_two_ranks_generate_the_tokens_of_transformers(
    name: str, chunk: int | None, two_ranks: TwoRanks
) -> None:
    (runs, _), (others, _) = (result[name, chunk] for result in two_ranks.by_rank)
    assert_generates_as(two_ranks.references[name], PROMPTS, runs)
    for run, other in zip(runs, others, strict=True):
        # Ranks sample by themselves: a bit of difference would let them drift apart.
        assert torch.equal(torch.stack(run.logits), torch.stack(other.logits))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_two_ranks_with_half_of_the_heads_generate_the_tokens_of_one(
    name: str, two_ranks: TwoRanks
) -> None:
    (runs, layers) = two_ranks.by_rank[0][name, 8]
    alone = load(
        ProcessGroup.single(), two_ranks.folder / name, make_kernels("plain", deterministic=False)
    )
    for run, expected in zip(runs, alone.generate(PROMPTS, NUM_TOKENS, chunk=8), strict=True):
        assert run.ids == expected.ids
        torch.testing.assert_close(logprobs(run), logprobs(expected), atol=1e-4, rtol=0)
    assert layers == tuple(
        KVLayer(layer.num_kv_heads // 2, layer.head_dim) for layer in alone.model.geometry.layers
    )
    shape = ModelDescription.read(two_ranks.folder / name).layer_shape(2)
    assert set(layers) == {KVLayer(shape.num_kv_heads, shape.head_dim)}


def every_logit(driver: Driver, run: Run, chunk: int) -> Tensor:
    """Logits of all tokens of `run`, computed `chunk` at a time together with another prompt."""
    logits = []
    while run.computed < len(run.ids):
        count = min(chunk, len(run.ids) - run.computed)
        beside = Run(prompt_of(29, seed=chunk))
        batch = driver.admit([(beside, 29), (run, count)])
        batch = replace(batch, logit_rows=torch.arange(29, 29 + count))
        logits.append(driver.model.forward(batch, driver.cache))
        run.computed += count
    return torch.cat(logits)


def bits_by_chunk(group: ProcessGroup, folder: Path) -> dict[tuple[str, str], list[Tensor]]:
    """The logits of a prompt in chunks of 41, 7 and 1, by checkpoint and dtype."""
    result = {}
    for name in CHECKPOINTS:
        for dtype in (torch.float32, torch.bfloat16):
            kernels = make_kernels("cpu", deterministic=True)
            torch.set_num_threads(1)
            driver = load(group, folder / name, kernels, dtype)
            assert driver.model.info.batch_invariant
            result[name, str(dtype)] = [
                every_logit(driver, Run(list(PROMPTS[1])), chunk) for chunk in (41, 7, 1)
            ]
    return result


@pytest.mark.long
def test_bits_on_two_ranks_depend_only_on_the_sequence(two_ranks: TwoRanks, tmp_path: Path) -> None:
    for result in run_ranks(tmp_path, 2, bits_by_chunk, two_ranks.folder):
        for name, (whole, *chunked) in result.items():
            assert whole.isfinite().all()
            assert all(torch.equal(whole, each) for each in chunked), name


def resident(group: ProcessGroup, folder: Path) -> tuple[list[tuple[int, ...]], Tensor]:
    """Shapes of the weights that a rank's kernels were given, and the logits of a prompt."""
    kernels = make_kernels("plain", deterministic=False)
    shapes: list[tuple[int, ...]] = []
    make = kernels.linear

    def recorded(weight: Tensor, bias: Tensor | None = None) -> Any:
        assert weight.dtype == torch.float32
        shapes.append(tuple(weight.shape))
        return make(weight, bias)

    kernels.linear = recorded  # type: ignore[method-assign]
    driver = load(group, folder, kernels)
    logits = driver.generate([PROMPTS[0]], 1)[0].logits[0]
    return sorted(set(shapes)), logits


def test_a_rank_copies_no_more_than_its_part_of_a_file_of_another_dtype(tmp_path: Path) -> None:
    save_tiny(tmp_path / "whole", "starcoder2").bfloat16().save_pretrained(tmp_path / "model")
    by_rank = run_ranks(tmp_path, 2, resident, tmp_path / "model")
    _, alone = resident(ProcessGroup.single(), tmp_path / "model")
    for shapes, logits in by_rank:
        assert shapes == [(16, 64), (32, 64), (40, 64), (64, 32), (64, 40), (100, 64)]
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=0)


def in_int8(group: ProcessGroup, folder: Path) -> Tensor:
    kernels = make_kernels("cpu", deterministic=True)
    driver = load(group, folder, with_int8(kernels), torch.bfloat16)
    return driver.generate([PROMPTS[1]], 1)[0].logits[0]


@pytest.mark.parametrize("name", ["gpt_neox", "starcoder2"])
def test_int8_weights_are_close_to_the_file(name: str, two_ranks: TwoRanks, tmp_path: Path) -> None:
    expected = greedy(two_ranks.references[name], PROMPTS[1], 1)[1][0]
    for result in (
        in_int8(ProcessGroup.single(), two_ranks.folder / name),
        *run_ranks(tmp_path, 2, in_int8, two_ranks.folder / name),
    ):
        distance = (result.log_softmax(-1) - expected).square().mean().sqrt()
        assert 1e-3 < distance / expected.std() < 0.15


def refusal(folder: Path, ranks: int) -> str:
    """The text of the refusal, which comes before any collective; the weights are gone."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    with pytest.raises(UnsupportedModel) as refused:
        load(ProcessGroup(0, ranks, CPU), folder, make_kernels("plain", deterministic=False))
    with pytest.raises(UnsupportedModel) as also:
        ModelDescription.read(folder).layer_shape(ranks)
    assert str(also.value) == str(refused.value)
    return str(refused.value)


def test_a_class_without_a_plan_runs_on_one_shard(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt2")
    text = refusal(tmp_path, 2)
    assert text == "gpt2 runs on one shard only: GPT2LMHeadModel has no tensor-parallel plan"


@pytest.mark.parametrize(
    ("model_type", "overrides", "ranks", "work"),
    [
        ("starcoder2", {"num_attention_heads": 8, "num_key_value_heads": 2}, 4, "1, 2"),
        ("starcoder2", {"intermediate_size": 81}, 2, "1"),
        ("gpt_neox", {"num_key_value_heads": 4}, 3, "1, 2, 4"),
        ("flex_olmo", {"num_key_value_heads": 4, "intermediate_size": 82}, 4, "1, 2"),
    ],
)
def test_ranks_that_do_not_divide_a_class_are_refused_with_those_that_do(
    model_type: str, overrides: dict[str, Any], ranks: int, work: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, model_type, **overrides)
    assert refusal(tmp_path, ranks).endswith(f"; these numbers of shards work: {work}")


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (
            ("layers.*.self_attn.q_proj", "diagonal"),
            "its tensor-parallel plan has style 'diagonal' for model.layers.*.self_attn.q_proj; the known styles are: "
            "colwise, colwise_gather_output,",
        ),
        (("embed_tokens", "colwise"), "style 'colwise' for model.embed_tokens, a Embedding"),
        (("norm", "embedding_rowwise"), "style 'embedding_rowwise' for model.norm, a LayerNorm"),
        (("norm.weight", "rowwise"), "style 'rowwise' for model.norm.weight, a Parameter"),
    ],
)
def test_a_plan_that_is_not_understood_is_refused_by_name(
    entry: tuple[str, str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "starcoder2")
    kind: Any = CONFIG_MAPPING["starcoder2"]
    monkeypatch.setattr(kind, "base_model_tp_plan", kind.base_model_tp_plan | dict([entry]))
    assert text in refusal(tmp_path, 2)


GATHERED = {
    **{f"layers.*.self_attn.{name}_proj": "colwise_gather_output" for name in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise_split_input",
    "layers.*.mlp.c_fc": "colwise",
    "layers.*.mlp.c_proj": "rowwise",
    "norm": "replicated_with_grad_allreduce",
    "embed_tokens": "embedding_rowwise",
}


def _gathered(group: ProcessGroup, folder: Path) -> Any:
    CONFIG_MAPPING["starcoder2"].base_model_tp_plan = GATHERED
    driver = load(group, folder, make_kernels("plain", deterministic=False))
    return driver.generate(PROMPTS, NUM_TOKENS), driver.model.geometry.layers


def test_plans_that_gather_split_and_share_embeddings_match_transformers(tmp_path: Path) -> None:
    """Attention is whole on each rank, so that three ranks may share four heads."""
    folder = tmp_path / "model"
    reference = save_tiny(folder, "starcoder2", intermediate_size=84, head_dim=24)
    for runs, layers in run_ranks(tmp_path, 3, _gathered, folder):
        assert layers == (KVLayer(2, 24),) * 2
        assert_generates_as(reference, PROMPTS, runs)


def _lopsided(group: ProcessGroup, folder: Path) -> str:
    plan = {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}
    CONFIG_MAPPING["starcoder2"].base_model_tp_plan = plan
    with pytest.raises(UnsupportedModel) as refused:
        load(group, folder, make_kernels("plain", deterministic=False))
    return str(refused.value)


def test_a_plan_that_splits_only_queries_is_refused(tmp_path: Path) -> None:
    """Otherwise queries would attend to the heads of other queries."""
    save_tiny(tmp_path / "model", "starcoder2")
    for text in run_ranks(tmp_path, 2, _lopsided, tmp_path / "model"):
        assert text.endswith("attends with 2 heads and 2 key-value heads, not 2 and 1")
