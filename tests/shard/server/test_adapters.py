"""Adapters over the wire: loading during steps, refusals, sequences that use them, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_shard.adapters.adapter_store import AdapterStore
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.engine.engine import Engine
from millrace_shard.engine.loaded_model import AdapterMemory, LoadedModel
from millrace_shard.engine.warmup import MemoryLimits
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.server.service import ShardService, new_server
from millrace_testing.models.adapters import make_adapter, write_canonical
from millrace_testing.models.models import prompt_of, read_model, save_tiny

CPU = torch.device("cpu")
SECONDS = 60.0
TARGETS = ["q_proj", "down_proj"]
PROMPT = prompt_of(9, seed=2)
WARMUP = pb.WarmupRequest(
    max_batch_prefill_tokens=64, max_batch_size=4, max_concurrent_requests=4, max_adapters=3
)
PAGES = 2


@dataclass
class Shard:
    """A server over a tiny model, with adapters in its cache folder."""

    stub: pb_grpc.ShardServiceStub
    cache: Path
    base: PreTrainedModel
    adapters: list[PeftModel]
    digests: list[str]
    epoch: int = 70
    number: int = 0
    requests: SimpleQueue[pb.StepRequest | None] = field(default_factory=SimpleQueue)

    def open(self) -> None:
        """Open an epoch on a new stream."""
        self.epoch, self.number = self.epoch + 1, -1
        self.requests = SimpleQueue()
        self.call = self.stub.Steps(iter(self.requests.get, None), timeout=SECONDS)
        self.step(open=pb.Open())

    def step(self, **work: object) -> pb.StepResponse:
        self.number += 1
        self.requests.put(pb.StepRequest(epoch=self.epoch, number=self.number, **work))  # type: ignore[arg-type]
        answer: pb.StepResponse = next(self.call)
        assert not answer.HasField("error"), answer.error.message
        return answer

    def load(self, slot: int, digest: str, epoch: int | None = None) -> str:
        """The error of LoadAdapter, or nothing."""
        request = pb.LoadAdapterRequest(epoch=epoch or self.epoch, slot=slot, digest=digest)
        return self.stub.LoadAdapter(request, timeout=SECONDS).error

    def unload(self, slot: int, epoch: int | None = None) -> None:
        request = pb.UnloadAdapterRequest(epoch=epoch or self.epoch, slot=slot)
        self.stub.UnloadAdapter(request, timeout=SECONDS)

    def sample(self, *adapter_slots: int) -> pb.StepResponse:
        """The answer to the first step of one sequence for each adapter slot, which then leave."""
        slots = list(range(len(adapter_slots)))
        change = pb.BatchChange(
            admitted=[
                pb.Sequence(slot=slot, request_id=slot, input_ids=PROMPT, adapter_slot=adapter)
                for slot, adapter in enumerate(adapter_slots)
            ],
            grown_slots=slots,
            grown_blocks=[slot + 1 for slot in slots],
        )
        prefill = pb.Prefill(
            change=change, chunk_slots=slots, chunk_tokens=[len(PROMPT)] * len(slots)
        )
        answer = self.step(prefill=prefill)
        self.step(filter_batch=pb.FilterBatch(dropped_slots=slots))
        return answer


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    torch.set_num_threads(1)
    cache = tmp_path / "cache"
    base = save_tiny(tmp_path / "model", "llama")
    adapters = [make_adapter(base, seed=n, r=8, target_modules=TARGETS) for n in range(3)]
    adapters.append(make_adapter(base, seed=3, r=100, target_modules="all-linear"))
    digests = [write_canonical(adapter, cache) for adapter in adapters]
    table, kernels = AdapterTable(CPU), PlainKernels(deterministic=True)
    limits = MemoryLimits(kv_memory=1 << 21, adapters=AdapterMemory(bytes=PAGES << 16))
    engine = Engine(limits=limits, device=CPU, cpu_threads=1)
    engine.start()
    group = ProcessGroup.single()

    def load() -> LoadedModel:
        model = read_model(tmp_path / "model", kernels, group=group, adapters=table)
        return LoadedModel(
            model=model,
            kernels=kernels,
            group=group,
            device=CPU,
            dtype=torch.float32,
            adapters=AdapterStore(table, cache, torch.float32),
        )

    engine.attach(engine.submit(load).result(SECONDS))
    address = f"unix:{tmp_path}/shard"
    service = ShardService(engine, deterministic=True, prefill_logprobs=False, end=lambda: None)
    server = new_server(service, address)
    server.start()
    channel = grpc.insecure_channel(address)
    shard = Shard(pb_grpc.ShardServiceStub(channel), cache, base, adapters, digests)
    yield shard
    shard.requests.put(None)
    channel.close()
    server.stop(grace=None).wait(SECONDS)
    engine.close()


@pytest.fixture
def warm(shard: Shard) -> Shard:
    assert shard.stub.Warmup(WARMUP, timeout=SECONDS).adapter_pages == PAGES
    shard.open()
    return shard


def expected(model: torch.nn.Module) -> tuple[int, float]:
    """The likeliest next token, and its log probability."""
    with torch.no_grad():
        scores: Tensor = model(input_ids=torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    return int(scores.argmax()), float(scores.max())


def assert_tokens(answer: pb.StepResponse, models: list[torch.nn.Module]) -> None:
    wanted = [expected(model) for model in models]
    assert list(answer.ids) == [id_ for id_, _ in wanted]
    assert list(answer.logprobs) == pytest.approx([score for _, score in wanted], abs=1e-4)


def code_of(caught: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    code: grpc.StatusCode = caught.value.code()
    return code


def test_info_lists_the_modules_in_order_of_execution(shard: Shard) -> None:
    modules = shard.stub.Info(pb.InfoRequest(), timeout=SECONDS).adapter_modules
    names = [module.name.removeprefix("model.layers.") for module in modules]
    half = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    half += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert names == [f"{layer}.{name}" for layer in (0, 1) for name in half] + ["lm_head"]
    for module in modules:
        weight = shard.base.get_submodule(module.name).weight
        assert (module.outputs, module.inputs) == tuple(weight.shape)
        # 16 rows of A, 16 columns of B and 16 factors, in float32.
        assert module.bytes_per_slice >= 16 * 4 * (module.inputs + module.outputs + 1)


def test_rows_with_and_without_adapters_share_a_step(warm: Shard) -> None:
    assert warm.load(1, warm.digests[0]) == ""
    assert warm.load(3, warm.digests[1]) == ""
    assert_tokens(
        warm.sample(3, 0, 1, 3),
        [warm.adapters[1], warm.base, warm.adapters[0], warm.adapters[1]],
    )


def test_a_slot_gets_another_adapter_between_two_steps(warm: Shard) -> None:
    for index in (0, 1, 1, 2):
        assert warm.load(2, warm.digests[index]) == ""
        assert_tokens(warm.sample(2, 0), [warm.adapters[index], warm.base])


def test_a_sequence_with_an_empty_adapter_slot_fails_no_other(warm: Shard) -> None:
    warm.load(1, warm.digests[0])
    answer = warm.sample(1, 2, 0, 99)
    assert sorted(answer.failed_slots) == [1, 3]
    assert_tokens(answer, [warm.adapters[0], warm.base])
    warm.unload(1)
    assert list(warm.sample(1, 0).failed_slots) == [0]


def test_adapters_stay_over_epochs_and_go_with_a_warm_up(warm: Shard) -> None:
    warm.load(1, warm.digests[0])
    warm.open()
    assert_tokens(warm.sample(1), [warm.adapters[0]])
    (warm.cache / warm.digests[0] / "adapter.safetensors").unlink()
    assert warm.load(1, warm.digests[0]) == "", "it is there already"
    other = pb.WarmupRequest()
    other.CopyFrom(WARMUP)
    other.max_adapters = 2
    other.adapter_pages = PAGES + 1
    assert warm.stub.Warmup(other, timeout=SECONDS).adapter_pages == PAGES + 1
    warm.open()
    assert list(warm.sample(1).failed_slots) == [0]


def test_a_restart_of_the_router_frees_all_adapter_memory(warm: Shard) -> None:
    """It warms up as the one before, and knows nothing of the adapters in the slots."""
    for slot in (1, 2):
        assert warm.load(slot, warm.digests[slot]) == ""
    assert warm.stub.Warmup(WARMUP, timeout=SECONDS).adapter_pages == PAGES
    warm.open()
    assert list(warm.sample(1).failed_slots) == [0]
    for slot in (2, 3):
        assert warm.load(slot, warm.digests[0 if slot == 3 else 1]) == ""
    assert_tokens(warm.sample(2, 3), [warm.adapters[1], warm.adapters[0]])


def test_calls_of_another_epoch_are_refused(warm: Shard) -> None:
    for call in (
        lambda: warm.load(1, warm.digests[0], epoch=5),
        lambda: warm.unload(1, epoch=5),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert code_of(caught) is grpc.StatusCode.FAILED_PRECONDITION


def test_unusable_files_are_reported_and_change_nothing(warm: Shard) -> None:
    warm.load(1, warm.digests[0])
    file = warm.cache / warm.digests[1] / "adapter.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "another SHA-256" in warm.load(1, warm.digests[1])
    assert "cannot be read" in warm.load(1, "0" * 64)
    assert "is not the SHA-256" in warm.load(1, "../" + warm.digests[2])
    assert "adapter slot 4" in warm.load(4, warm.digests[2])
    assert_tokens(warm.sample(1), [warm.adapters[0]])


def test_an_adapter_of_another_model_names_module_and_shapes(warm: Shard, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"intermediate_size": 96}, "mlp.down_proj is 64 x 80, the adapter's 64 x 96"),
        ({"num_hidden_layers": 3}, "module model.layers.2."),
    ]
    for changes, words in cases:
        other = save_tiny(tmp_path / words, "llama", **changes)
        digest = write_canonical(make_adapter(other, r=4, target_modules=["down_proj"]), warm.cache)
        assert words in warm.load(1, digest)


def test_memory_is_counted_in_pages_and_freed(warm: Shard) -> None:
    bytes_of = {
        module.name: module.bytes_per_slice
        for module in warm.stub.Info(pb.InfoRequest(), timeout=SECONDS).adapter_modules
    }
    # One slice of q_proj and of down_proj in each of two layers.
    layer = "model.layers.0."
    own = 2 * (bytes_of[layer + "self_attn.q_proj"] + bytes_of[layer + "mlp.down_proj"])
    assert own < 1 << 16, "such an adapter fills one page"
    for slot in range(1, PAGES + 1):
        assert warm.load(slot, warm.digests[slot - 1]) == ""
    for digest in (warm.digests[2], warm.digests[3]):
        with pytest.raises(grpc.RpcError) as caught:
            warm.load(3, digest)
        assert code_of(caught) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert warm.load(2, warm.digests[2]) == "", "an adapter leaves its pages to the next one"
    warm.unload(1)
    assert warm.load(3, warm.digests[1]) == ""


def test_an_adapter_that_leaves_before_its_sequence_fails_the_step(warm: Shard) -> None:
    warm.load(1, warm.digests[0])
    change = pb.BatchChange(
        admitted=[pb.Sequence(slot=0, request_id=1, input_ids=PROMPT, adapter_slot=1)],
        grown_slots=[0],
        grown_blocks=[1],
    )
    warm.step(prefill=pb.Prefill(change=change, chunk_slots=[0], chunk_tokens=[len(PROMPT)]))
    warm.load(1, warm.digests[1])
    with pytest.raises(AssertionError, match="has left its slot"):
        warm.step(decode=pb.Decode(decode_slots=[0]))
