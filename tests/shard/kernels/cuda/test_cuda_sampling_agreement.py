"""The check of the operators on scores rejects what is wrong: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from millrace_shard.kernels.agreement import TOLERANCE, distance
from millrace_shard.kernels.scores import Best, choose_greedy

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.kernels.cuda import sampling_agreement
from millrace_shard.kernels.cuda.operators import CudaKernels, TritonSampling
from millrace_shard.kernels.cuda.served_agreement import served_difference
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.plain import PlainKernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MOST = TOLERANCE[torch.bfloat16]
"""The greatest tolerance: a fault in whole numbers is above each."""
SMALL_VOCAB = 40


class Wrong(TritonSampling):
    """Sampling operators of which one has a fault."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def find_threshold(
        self, keys: Tensor, probabilities: Tensor | None, limit: Tensor, /
    ) -> Tensor:
        if self._fault == "top-k" and probabilities is None:
            return super().find_threshold(keys, None, limit + 1)
        # Keys of typical-p are at most 0.
        name = "typical-p" if keys.amax() <= 0 else "top-p"
        if self._fault == name and probabilities is not None:
            return super().find_threshold(keys, probabilities, limit / 2)
        result = super().find_threshold(keys, probabilities, limit)
        if self._fault == "ties":
            return torch.nextafter(result, torch.full_like(result, torch.inf))
        return result

    def count_tokens(
        self, counts: Tensor, token_table: Tensor, spans: Tensor, longest: int
    ) -> None:
        if self._fault == "prompts":
            spans = spans.clone()
            spans[3] += 1
        super().count_tokens(counts, token_table, spans, longest)
        if self._fault == "counts":
            counts[0, 0] += 1

    def penalise(
        self, scores: Tensor, counts: Tensor, token_table: Tensor, rows: Tensor, penalties: Tensor
    ) -> None:
        if self._fault.startswith("penalty"):
            penalties = penalties.clone()
            penalties[int(self._fault[-1])] *= 1.5
        if self._fault == "late tokens":
            rows = torch.stack((rows[0], rows[1], rows[3], rows[3], rows[4]))
        super().penalise(scores, counts, token_table, rows, penalties)


def difference(fault: str) -> float:
    pairs = sampling_agreement.outputs(Wrong(fault), device=DEVICE)
    return distance(*zip(*pairs, strict=True))


def test_right_operators_agree_for_every_size_of_vocabulary() -> None:
    for size in (SMALL_VOCAB, 4096, sampling_agreement.UNEVEN_VOCAB):
        pairs = sampling_agreement.outputs(TritonSampling(), size, DEVICE)
        assert distance(*zip(*pairs, strict=True)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    "fault",
    [
        *("top-k", "top-p", "typical-p", "ties", "counts", "prompts", "late tokens"),
        *(f"penalty {number}" for number in range(4)),
    ],
)
def test_a_fault_of_an_operator_is_detected(fault: str) -> None:
    assert difference(fault) > MOST


def third_of(logits: Tensor) -> Tensor:
    return logits.topk(3, dim=-1).indices[:, 2]


def last_of(logits: Tensor) -> Tensor:
    size = logits.shape[1]
    return size - 1 - logits.flip(-1).max(-1).indices


@pytest.mark.parametrize("choose", [third_of, last_of], ids=["third", "last-of-equals"])
def test_a_fault_of_the_greedy_choice_is_detected(
    monkeypatch: pytest.MonkeyPatch, choose: Callable[[Tensor], Tensor]
) -> None:
    def choose_wrongly(logits: Tensor) -> Best:
        return choose_greedy(logits)._replace(ids=choose(logits))

    monkeypatch.setattr(sampling_agreement, "choose_greedy", choose_wrongly)
    assert difference("none") > MOST


@pytest.mark.parametrize("fault", ["none", "top-k"])
def test_the_check_of_served_shapes_includes_sampling(fault: str) -> None:
    kernels = PlainKernels(deterministic=False)
    kernels.sampling = Wrong(fault)
    result = served_difference(
        kernels,
        PlainKernels(deterministic=False),
        dtype=torch.float32,
        shape=LayerShape(num_heads=2, num_kv_heads=1, head_dim=16, head=(SMALL_VOCAB, 32)),
        device=DEVICE,
    )
    assert (result > MOST) == (fault != "none")


def test_the_kernels_of_cuda_have_sampling_operators() -> None:
    assert CudaKernels(deterministic=False).sampling is not None
