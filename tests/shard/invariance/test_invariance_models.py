"""Models of every architecture on CPU: the logits of a position, bit for bit, in any batch and any chunks.

The oracle is each sequence alone, a token at a time. Wide steps are longer than what torch gives to one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.models.families.registry import FAMILIES
from millrace_shard.models.interface import CausalModel
from millrace_shard.models.transformers_backend import transformers_model
from millrace_shard.models.transformers_backend.supported import SUPPORTED
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.models.models import CONFIGS, Driver, Run, prompt_of, read_model, save_tiny

CPU = torch.device("cpu")
LENGTH = 37
CUTS = (LENGTH, 33, 7)
STEPS = (2, 17, 32, 33, 64, 65, 128)
"""Tokens of whole steps, the one looked at among them."""

_ODD = {"hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of 24, and below gates of which neither a row nor a thread's share is whole vectors."""
ODD: dict[str, dict[str, Any]] = {
    **{name: _ODD | {"intermediate_size": 331} for name in CONFIGS},
    **{
        name: _ODD | {"intermediate_size": 331, "head_dim": 24}
        for name in ("gemma2", "glm4", "qwen3")
    },
    "bamba": _ODD | {"intermediate_size": 331, "mamba_d_head": 12},
    "granitemoehybrid": _ODD | {"shared_intermediate_size": 331, "mamba_d_head": 12},
    "falcon_h1": _ODD | {"intermediate_size": 331, "mamba_d_head": 12, "mamba_d_ssm": 96},
    "nemotron_h": _ODD
    | {
        "intermediate_size": 331,
        "moe_intermediate_size": 331,
        "mamba_head_dim": 12,
        "head_dim": 24,
    },
    "mamba2": {"hidden_size": 48, "head_dim": 12},
    "mamba": {"hidden_size": 52},
    "falcon_mamba": {"hidden_size": 52},
    "gptj": {"n_embd": 48, "n_head": 2, "n_inner": 331},
    "falcon": _ODD | {"num_kv_heads": 1, "ffn_hidden_size": 331},
    "bloom": {"hidden_size": 48, "n_head": 2},
    "mpt": {"d_model": 48, "n_heads": 2},
    "dbrx": {
        "d_model": 48,
        "n_heads": 2,
        "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 331, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "gpt2": {"n_embd": 48, "n_head": 2, "n_inner": 331},
    "gpt_bigcode": {"n_embd": 48, "n_head": 2, "n_inner": 331},
    "opt": _ODD | {"ffn_dim": 331, "word_embed_proj_dim": 48},
    "qwen2_moe": _ODD | {"moe_intermediate_size": 331, "shared_expert_intermediate_size": 203},
    **{
        name: _ODD
        | {"num_key_value_heads": 2, "moe_intermediate_size": 331, "intermediate_size": 331}
        for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear")
    },
}
WIDE_LATENTS = {
    "hidden_size": 160,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "moe_intermediate_size": 48,
}
"""Widths that tiles take, and more heads than a tile has rows."""
VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in (*FAMILIES, *SUPPORTED)},
    **{f"{name}-odd": (name, ODD[name]) for name in (*FAMILIES, *SUPPORTED)},
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "gemma2-caps": ("gemma2", {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 3.0}),
    "opt-gelu": ("opt", {"do_layer_norm_before": False, "activation_function": "gelu"}),
    "opt-quick": ("opt", {"ffn_dim": 331, "activation_function": "quick_gelu"}),
    "cohere-qk-norm": ("cohere", {"use_qk_norm": True}),
    "gemma4-experts": (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "mixtral-window": ("mixtral", {"sliding_window": 9}),
    "qwen2_moe-normalised": (
        "qwen2_moe",
        {"norm_topk_prob": True, "num_experts": 40, "num_experts_per_tok": 9},
    ),
    "deepseek_v2-tiles": ("deepseek_v2", WIDE_LATENTS),
    "glm4_moe_lite-tiles": ("glm4_moe_lite", WIDE_LATENTS),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


EVERYWHERE = ("cpu-bf16", "cpu-fp32")
FALLBACKS = ("cpu-bf16-without-tiles", "plain-bf16", "plain-fp32")
"""Other products and attention below the same modules."""
CODES = ("cpu-bf16-int4", "cpu-bf16-int4-integer", "cpu-bf16-fp8")
"""Weights of codes, with activations in bfloat16 or in int8."""
IN_BOTH = ("llama-odd", "gemma2-caps", "qwen3_next", "deepseek_v2-tiles")
"""Their bits in float32, too, are part of the short tests."""
CASES: list[Any] = [
    pytest.param(name, kernels, marks=[pytest.mark.long] * is_long)
    for name in VARIATIONS
    for kernels in EVERYWHERE
    for is_long in [
        name not in IN_BOTH and (kernels == EVERYWHERE[1] or f"{name}-odd" in VARIATIONS)
    ]
] + [
    (name, kernels)
    for name in ("llama-odd", "mistral-window", "gpt2-odd", "gemma2-caps", "qwen2_moe-odd")
    for kernels in FALLBACKS
]
CASES += [(name, kernels) for name in ("mixtral", "gpt_oss", "qwen3_moe") for kernels in CODES]
CASES += [("glm4_moe", CODES[1]), ("deepseek_v2-tiles", CODES[1])]
CASES += [
    pytest.param(name, kernels, marks=[pytest.mark.long] * (name == "deepseek_v2-tiles"))
    for name in ("deepseek_v2-tiles", "deepseek_v3")
    for kernels in FALLBACKS
]


def loader_of(kernels: str, folder: Path) -> Loader:
    """Loads with the kernels and in the dtype that `kernels` names."""
    name, kind, *rest = kernels.split("-", 2)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[kind]
    made = make_kernels(name, deterministic=True)
    if rest == ["without-tiles"]:
        return Loader(CpuKernels(deterministic=True, tiles=False), dtype, folder)
    quantize = rest[0].removesuffix("-integer") if rest else None
    if quantize is not None and kernels.endswith("-integer"):
        made = CpuKernels(deterministic=True, integer=True)
    return Loader(made, dtype, folder, quantize)


@dataclass
class Loader:
    """Kernels and a dtype to load tiny checkpoints with."""

    kernels: Kernels
    dtype: torch.dtype
    folder: Path
    quantize: str | None = None

    def __call__(self, model_type: str, **overrides: Any) -> CausalModel:
        save_tiny(self.folder, model_type, **overrides)
        return read_model(self.folder, self.kernels, dtype=self.dtype, quantize=self.quantize)

    def driver(self, model: CausalModel) -> Driver:
        """A driver with an empty cache."""
        return Driver(model, self.kernels, dtype=self.dtype)


def step(driver: Driver, rows: Sequence[tuple[Run, int]]) -> list[Tensor]:
    """Logits of every token of the step, by run."""
    batch = driver.admit(rows)
    batch = replace(batch, logit_rows=torch.arange(len(batch.ids)))
    logits = driver.model.forward(batch, driver.cache)
    for run, count in rows:
        run.computed += count
    return list(torch.split(logits, [count for _, count in rows]))


def one_by_one(driver: Driver, ids: list[int]) -> Tensor:
    """[len(ids), vocab]."""
    run = Run(ids)
    return torch.cat([step(driver, [(run, 1)])[0] for _ in ids])


def in_batches(driver: Driver, ids: list[int], cut: int) -> Tensor:
    """In chunks of at most `cut`, each between chunks of other prompts that start over."""
    subject, before, after = Run(ids), Run(prompt_of(130, seed=7)), Run(prompt_of(90, seed=8))
    logits: list[Tensor] = []
    while subject.computed < len(ids):
        before.computed = after.computed = 0
        turn = len(logits) % 3
        rows = [(subject, min(cut, len(ids) - subject.computed))]
        rows = [(before, 1 + 43 * turn)] * (turn != 1) + rows + [(after, 19 * turn + 1)]
        logits.append(step(driver, rows)[len(rows) - 2])
    return torch.cat(logits)


def last_of_many(driver: Driver, ids: list[int]) -> Iterator[Tensor]:
    """The logits of the last token alone, computed anew in steps of STEPS tokens: first, amid the others and last."""
    subject, before, after = Run(ids), Run(prompt_of(130, seed=7)), Run(prompt_of(130, seed=8))
    step(driver, [(subject, len(ids) - 1)])
    for number, tokens in enumerate(STEPS):
        subject.computed, before.computed, after.computed = len(ids) - 1, 0, 0
        first = (0, tokens // 2, tokens - 1)[number % 3]
        counts = ((before, first), (subject, 1), (after, tokens - 1 - first))
        rows = [(run, count) for run, count in counts if count]
        yield step(driver, rows)[1 if first else 0][0]


@pytest.mark.parametrize(("name", "kernels"), CASES, ids=str)
def test_bits_depend_only_on_the_sequence(name: str, kernels: str, tmp_path: Path) -> None:
    model_type, overrides = VARIATIONS[name]
    loader = loader_of(kernels, tmp_path)
    model = loader(model_type, **overrides)
    assert model.info.batch_invariant
    ids = prompt_of(LENGTH, seed=3)
    # In plain torch a library's products may share long sums among threads: there the number is fixed.
    # Many are for few steps: where they outnumber the cores, they wait for each other.
    threads = (
        (3, 2, 1) if kernels.startswith("cpu") else (2 if kernels.endswith("fp32") else 1,) * 3
    )
    torch.set_num_threads(threads[-1])
    expected = one_by_one(loader.driver(model), ids)
    assert expected.isfinite().all()
    for tokens, logits in zip(STEPS, last_of_many(loader.driver(model), ids), strict=True):
        assert torch.equal(logits, expected[-1]), tokens
    for num_threads, cut in zip(threads, CUTS, strict=True):
        torch.set_num_threads(num_threads)
        assert torch.equal(in_batches(loader.driver(model), ids, cut), expected), cut


MOVES = """
alias arange cat chunk clone contiguous copy detach dropout embedding empty empty_like expand flatten index index_put
lift_fresh new_empty ones pad permute repeat_interleave reshape resolve_conj resolve_neg select slice split
split_with_sizes squeeze stack to to_copy transpose type_as unbind unsafe_view unsqueeze view
"""
ROUNDS_EACH = "add div floor_divide mul neg pow relu rsqrt rsub sub"
BY_ROWS = "argsort bincount layer_norm mean native_layer_norm softmax sort sum topk"
OF_INTEGERS = "all any cumsum diff eq is_nonzero item ne"
ROW_BY_ROW = {
    name for names in (MOVES, ROUNDS_EACH, BY_ROWS, OF_INTEGERS) for name in names.split()
}
"""Operators that classes may call: they move elements, round each as IEEE 754 says, or reduce rows one by one."""


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators of torch's own that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.names.add(func.overloadpacket.__name__.strip("_"))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, (kind, _) in VARIATIONS.items()
        if kind in SUPPORTED and not name.endswith("-odd")
    ],
)
def test_classes_use_only_operators_that_round_each_row_alike(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks at the operators, since a last bit that changes with the step may not show in a few steps."""
    model_type, overrides = VARIATIONS[name]
    loader = loader_of("cpu-fp32", tmp_path)
    model = loader(model_type, **overrides)
    monkeypatch.setattr(transformers_model, "elementwise", lambda _, x: x)
    run, operators = Run(prompt_of(40)), Operators()
    driver = loader.driver(model)
    batch = driver.admit([(run, 40)])
    with operators:
        model.forward(batch, driver.cache)
    assert operators.names <= ROW_BY_ROW
