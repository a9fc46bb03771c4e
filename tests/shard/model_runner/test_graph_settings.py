"""Which graphs are captured, and which versions of torch may release memory after a failed capture."""

from __future__ import annotations

import pytest
import torch

from millrace_shard.model_runner.graph_capture import (
    CudaCapture,
    GraphSettings,
    empty_cache,
    ends_failed_captures,
)

CUDA = torch.device("cuda")
BY_8 = [64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1]


@pytest.mark.parametrize(
    ("max_batch_size", "sizes"),
    [
        (1, [1]),
        (3, [3, 2, 1]),
        (8, [8, 4, 2, 1]),
        (30, [30, 24, 16, 8, 4, 2, 1]),
        (64, BY_8),
        (100, [100, 96, 80, *BY_8]),
        (256, [256, 240, 224, 208, 192, 176, 160, 144, 128, 112, 96, 80, *BY_8]),
    ],
)
def test_there_are_graphs_up_to_the_largest_batch(max_batch_size: int, sizes: list[int]) -> None:
    assert GraphSettings(None, CudaCapture).sizes_up_to(max_batch_size) == sizes


def test_the_number_of_graphs_is_bounded() -> None:
    for max_batch_size in (*range(1, 300), 1000, 100_000):
        sizes = GraphSettings(None, CudaCapture).sizes_up_to(max_batch_size)
        assert len(sizes) <= 24
        assert sizes[0] == min(max_batch_size, 256)


def test_a_kind_that_cannot_be_captured_leaves_the_others() -> None:
    settings = GraphSettings(None, CudaCapture)
    settings.not_capturable.add("pieces")
    assert not settings.may_capture("pieces")
    assert settings.may_capture("graphs")


def test_given_sizes_are_those_that_a_batch_may_need() -> None:
    settings = GraphSettings((4, 1, 32, 2, 2), CudaCapture)
    assert settings.sizes_up_to(8) == [4, 2, 1]
    assert GraphSettings((), CudaCapture).sizes_up_to(8) == []


@pytest.mark.parametrize(
    ("version", "ends"),
    [
        ("2.11.0", False),
        ("2.12.1+cu128", False),
        ("2.13.0+cu130", True),
        ("2.14.0a0+git12", True),
        ("3.0.0", True),
    ],
)
def test_memory_is_released_unless_a_failed_capture_is_open(
    monkeypatch: pytest.MonkeyPatch, version: str, ends: bool
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(None))
    monkeypatch.setattr(torch, "__version__", version)
    assert ends_failed_captures(version) == ends
    settings = GraphSettings(None, CudaCapture)
    empty_cache(CUDA, None)
    empty_cache(CUDA, settings)
    assert len(calls) == 2
    settings.capture_failed = True
    assert not settings.may_capture("graphs")
    assert settings.holds_cache == (not ends)
    empty_cache(CUDA, settings)
    assert len(calls) == (3 if ends else 2)
    empty_cache(torch.device("cpu"), None)
    assert len(calls) == (3 if ends else 2)
