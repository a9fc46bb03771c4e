"""The adapter to FlashAttention-3, against a stand-in that does what its documentation says."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.kernels import choose
from millrace_shard.kernels.agreement import TOLERANCE
from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.choose import choose_kernels
from millrace_shard.kernels.cuda import served_agreement, triton_pages
from millrace_shard.kernels.cuda.flash import FlashKernels
from millrace_shard.kernels.cuda.served_agreement import served_difference
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.plain import PlainKernels
from millrace_testing.router.pages import Pages, Span

CUDA = torch.device("cuda")
CONTEXTS = (50, 33, 7)
SPANS: tuple[Span, ...] = ((0, 20, 50), (1, 32, 33), (2, 0, 7))


def documented(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """The semantics in the docstring of `flash_attn_with_kvcache` in hopper/flash_attn_interface.py."""
    assert causal
    rows = []
    for b, (begin, end) in enumerate(torch.stack([cu_seqlens_q[:-1], cu_seqlens_q[1:]]).T):
        assert end - begin <= max_seqlen_q
        length = int(cache_seqlens[b])
        keys, values = (
            pages[page_table[b].long()].flatten(0, 1)[:length].double()
            for pages in (k_cache, v_cache)
        )
        group = q.shape[1] // keys.shape[1]
        keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), keys) * softmax_scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(length)
        aligned = at[length - int(end - begin) :, None]
        left, right = window_size
        seen = at <= aligned + (0 if right == -1 else right)
        if left != -1:
            seen &= at >= aligned - left
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        rows.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(rows).to(q.dtype)


@pytest.fixture(autouse=True)
def operators_of_torch_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "prompt_difference", lambda *_, **__: 0.0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's folder is one of the test."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module: Any = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = documented
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(choose, "served_difference", lambda *_, **__: 0.0)
    monkeypatch.setattr(choose, "differing_bits", lambda *_, **__: None)
    assert isinstance(module, ModuleType)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in computes on the CPU")
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (16, 3.0)])
def test_attention_matches_its_definition(window: int | None, softcap: float | None) -> None:
    kernels = FlashKernels()
    paged = Pages.random(
        kernels,
        CONTEXTS,
        heads=(4, 2, 16),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    out = paged.attend(SPANS, window, softcap)
    expected = paged.expected(SPANS, window, softcap)
    assert (out.double() - expected).abs().max() < 1e-6
    singles: tuple[Span, ...] = ((0, 49, 50), (1, 32, 33))
    out = paged.attend(singles, window, softcap)
    assert (out.double() - paged.expected(singles, window, softcap)).abs().max() < 1e-6
    kernels.zero_blocks(paged.cache, torch.arange(1, paged.cache.keys.shape[0]))
    assert paged.cache.keys[1:].count_nonzero() == paged.cache.values[1:].count_nonzero() == 0


@pytest.mark.usefixtures("installed")
def test_new_blocks_of_all_layers_are_cleared_in_a_launch_for_each_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels, launches = FlashKernels(), list[int]()
    zero = triton_pages.zero_pages

    def counted(addresses: Tensor, blocks: Tensor, num_bytes: int) -> None:
        launches.append(len(addresses))
        zero(addresses, blocks, num_bytes)

    monkeypatch.setattr(triton_pages, "zero_pages", counted)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def layer(num_blocks: int, group: int) -> LayerCache:
        shape = (num_blocks, 16, 5, 24)
        keys, values = (torch.ones(shape, dtype=torch.float16, device=device) for _ in range(2))
        return LayerCache(keys=keys, values=values, group=group)

    layers = [layer(9, 0), layer(4, 1), layer(9, 0)]
    blocks = [torch.tensor(each, device=device) for each in ([2, 5, 8], [1])]
    for _ in range(2):
        kernels.zero_layers(layers, blocks)
    assert launches == [4, 2] * 2
    assert len(kernels._addresses) == 2
    for each in layers:
        for pages in (each.keys, each.values):
            cleared = (pages.flatten(1) == 0).all(1).nonzero().flatten()
            assert cleared.tolist() == blocks[each.group].tolist()
            assert (pages.flatten(1) == 1).all(1).sum() == len(pages) - len(cleared)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("dtype", "deterministic", "name"),
    [
        (torch.bfloat16, False, "flash-attn"),
        (torch.float16, False, "flash-attn"),
        (torch.float32, False, "cuda"),
        (torch.bfloat16, True, "cuda"),
    ],
)
def test_flash_attention_is_chosen_where_it_fits(
    dtype: torch.dtype, deterministic: bool, name: str
) -> None:
    kernels = choose_kernels(
        CUDA, dtype, deterministic=deterministic, shapes=[LayerShape.small(64)]
    )
    assert kernels.name == name


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in computes on the CPU")
def test_a_build_without_soft_caps_agrees_for_models_without_them(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The interpreter takes minutes for the real numbers.
    monkeypatch.setattr(served_agreement, "LONG", ((70, 1, 9), (80, 81, 82)))
    monkeypatch.setattr(served_agreement, "MANY", (served_agreement.MANY[0], (5,) * 130))
    monkeypatch.setattr(served_agreement, "PROMPTS", ((20, 1, 9), (25, 30, 9)))

    def attend(*tensors: Tensor, softcap: float, **arguments: Any) -> Tensor:
        if softcap:
            raise RuntimeError("this build has no soft caps")
        return documented(*tensors, softcap=softcap, **arguments)

    installed.flash_attn_with_kvcache = attend
    check = partial(served_difference, FlashKernels(), PlainKernels(deterministic=False))
    without = LayerShape(num_heads=2, num_kv_heads=1, head_dim=16)
    assert check(dtype=torch.float32, shape=without) < TOLERANCE[torch.float32]
    with pytest.raises(RuntimeError, match="no soft caps"):
        check(dtype=torch.float32, shape=replace(without, kinds=((None, 3.0),)))


def test_another_package_named_flash_attn_is_not_chosen(
    installed: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    del installed.flash_attn_with_kvcache
    kernels = choose_kernels(
        CUDA, torch.bfloat16, deterministic=False, shapes=[LayerShape.small(64)]
    )
    assert kernels.name == "cuda"
    assert ["flash-attn" in record.message for record in caplog.records] == [True]


@pytest.mark.usefixtures("installed")
def test_flash_attention_is_not_chosen_where_it_differs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    differences = iter([0.7, 0.0])
    monkeypatch.setattr(choose, "served_difference", lambda *_, **__: next(differences))
    kernels = choose_kernels(
        CUDA, torch.bfloat16, deterministic=False, shapes=[LayerShape.small(64)]
    )
    assert kernels.name == "cuda"
    assert ["differ by 0.7" in record.message for record in caplog.records] == [True]


def test_a_package_with_a_missing_dependency_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choose, "served_difference", lambda *_, **__: 0.0)
    (tmp_path / "flash_attn_interface.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.syspath_prepend(tmp_path)
    kernels = choose_kernels(
        CUDA, torch.bfloat16, deterministic=False, shapes=[LayerShape.small(64)]
    )
    assert kernels.name == "cuda"
    assert ["nowhere_to_be_found" in record.message for record in caplog.records] == [True]


def test_a_missing_flash_attn_package_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choose, "served_difference", lambda *_, **__: 0.0)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    kernels = choose_kernels(
        CUDA, torch.bfloat16, deterministic=False, shapes=[LayerShape.small(64)]
    )
    assert kernels.name == "cuda"
    assert not caplog.records


@pytest.mark.usefixtures("installed")
def test_running_out_of_memory_does_not_condemn_flash_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = iter([torch.OutOfMemoryError("CUDA out of memory")])

    def measured(*_: object, **__: object) -> float:
        for error in errors:
            raise error
        return 0.0

    monkeypatch.setattr(choose, "served_difference", measured)
    with pytest.raises(torch.OutOfMemoryError):
        choose_kernels(CUDA, torch.bfloat16, deterministic=False, shapes=[LayerShape.small(64)])
