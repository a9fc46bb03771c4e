"""Launching a step reads nothing back from the device: each such operation would wait for all work before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from millrace_shard.batch.step import Forward
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.stored_weight import StoredWeight
from millrace_shard.model_runner.graph_capture import CudaCapture, GraphSettings, waits_as_errors
from millrace_shard.models.interface import CausalModel
from millrace_shard.speculation.loading import Speculation
from millrace_testing.engines.graphs import Recorder
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.engines.steps import SAMPLING, Stepper, beside, ints, tiny_llama
from millrace_testing.models.models import prompt_of
from millrace_testing.quantized.code_formats import random_codes

WAITING = {
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "nonzero_static",
    "masked_select",
    "equal",
    "bincount",
    "histc",
    "unique_consecutive",
    "_unique",
    "_unique2",
    "unique_dim",
    "repeat_interleave",
}
"""Operations whose result, or its shape, the host has to learn from the device."""


class WaitedError(Exception):
    """The operation would have waited for a device."""


class NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises WaitedError at an operation that would wait, were its tensors on CUDA."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """By name, or by an index that is a mask."""
        name = func.overloadpacket.__name__
        if name in WAITING or (name in ("index", "index_put", "index_put_") and _has_mask(args[1])):
            raise WaitedError(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting() -> Iterator[None]:
    with NoWaiting():  # type: ignore[no-untyped-call]
        yield


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


@pytest.mark.parametrize(
    "wait",
    [
        lambda t: t.sum().item(),
        lambda t: bool(t.any()),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
        lambda t: t.masked_select(t > 0),
        lambda t: t.__setitem__(t > 0, 1.0),
    ],
)
def test_the_detector_detects(wait: Callable[[Tensor], object]) -> None:
    with no_waiting(), pytest.raises(WaitedError):
        wait(torch.ones(3))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalModel, Kernels]:
    kernels = make_kernels("cpu", deterministic=False)
    return tiny_llama(tmp_path_factory.mktemp("llama"), kernels, torch.float32), kernels


def play(stepper: Stepper, kind: str, launching: Callable[[], Any]) -> None:
    """Prompts, mixed steps and decodes that are each launched inside `launching` and finished outside."""
    fields: dict[str, Any] = SAMPLING[kind]
    top = {"top_n_tokens": 3}
    scores = {"prefill_logprobs": True, "prefill_top_n_tokens": 3}
    steps: list[Callable[[], Forward]] = [
        lambda: stepper.admission(0, prompt_of(9), **fields, **scores),
        lambda: beside(stepper.admission(1, prompt_of(20, seed=1), **fields, **top), [0]),
        lambda: beside(stepper.admission(2, prompt_of(3, seed=2)), [1, 0]),
        lambda: Forward(decode_slots=ints([0, 1, 2])),
        lambda: Forward(decode_slots=ints([1])),
        lambda: Forward(decode_slots=ints([2, 0])),
    ]
    for make in steps:
        step = make()
        with torch.inference_mode():
            with launching():
                launched = stepper.runner.launch(step)
            result = launched.finish()
        assert len(result.slots) == len(step.chunk_slots) + len(step.decode_slots)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("by_graph", [False, True])
def test_launching_waits_for_nothing(
    llama: tuple[CausalModel, Kernels], kind: str, by_graph: bool
) -> None:
    recorder = Recorder()
    graphs = GraphSettings((1, 2, 4), recorder.new_capture) if by_graph else None
    stepper = Stepper(*llama, dtype=torch.float32, graphs=graphs)
    play(stepper, kind, no_waiting)
    assert recorder.replays() == ({1: 1, 2: 1, 4: 1} if by_graph else {})


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("has_draft", [False, True], ids=["ngrams", "draft"])
def test_launching_drafts_waits_for_no_operation(
    llama: tuple[CausalModel, Kernels], kind: str, has_draft: bool
) -> None:
    """A launch reads the host copies of earlier steps, and nothing of the launched step."""
    speculation = Speculation(max_draft_tokens=3, draft=llama[0] if has_draft else None)
    stepper = Stepper(*llama, dtype=torch.float32, speculation=speculation)
    fields: dict[str, Any] = SAMPLING[kind]
    loop = prompt_of(5) * 3
    steps = [
        stepper.admission(0, loop, **fields),
        beside(stepper.admission(1, loop, top_n_tokens=2), [0]),
        *(
            Forward(
                decode_slots=ints([1, 0]), decode_tokens=ints([4, 3]), draft_tokens=ints([3, 2])
            )
            for _ in range(3)
        ),
        Forward(decode_slots=ints([0, 1])),
    ]
    drafted = 0
    for step in steps:
        with torch.inference_mode():
            with no_waiting():
                launched = stepper.runner.launch(step)
            drafted += int(launched.finish().drafted_tokens.sum())
    assert drafted or not has_draft


def test_linears_over_codes_do_not_wait() -> None:
    pytest.importorskip("triton", reason="no Triton for this platform")
    cuda = import_module("millrace_shard.kernels.cuda.operators")
    parts = (
        random_codes("int4 with zeros", 8, 128, 64, in_order=False),
        random_codes("nf4", 8, 128, 64),
    )
    cpu = torch.device("cpu")
    weights = LinearWeights(StoredWeight(parts, torch.bfloat16, cpu), torch.zeros(16))
    linear = cuda.CudaKernels(deterministic=True).linear_from(weights)
    x = torch.ones(3, 128, dtype=torch.bfloat16)
    with no_waiting():
        assert linear(x).shape == (3, 16)


@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("by_graph", [False, True])
def test_cuda_reports_no_waiting_either(
    gpu: torch.device, kind: str, by_graph: bool, tmp_path: Path
) -> None:
    cuda = import_module("millrace_shard.kernels.cuda.operators")
    kernels = cuda.CudaKernels(deterministic=False)
    model = tiny_llama(tmp_path, kernels, torch.float32, gpu)
    graphs = GraphSettings((1, 2, 4), CudaCapture) if by_graph else None
    stepper = Stepper(model, kernels, dtype=torch.float32, graphs=graphs, device=gpu)
    play(stepper, kind, waits_as_errors)
