"""Images over the wire: putting, encoding, prompts with them, refusals, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
import torch
from transformers import PreTrainedModel

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_router.request.images import GridReduction, PreparedImage
from millrace_router.shards.wire import image_to_pb
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.engine.engine import Engine
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.engine.warmup import MemoryLimits
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.server.service import ShardService, new_server
from millrace_shard.server.wire import image_from_pb
from millrace_shard.vision.encoder import load_vision
from millrace_testing.models.models import read_model
from millrace_testing.models.vision_models import (
    IMAGE_TOKEN,
    Pixels,
    Prompt,
    picture,
    prompt_with,
    save_tiny_vision,
    spec_of,
)

CPU = torch.device("cpu")
SECONDS = 60.0
ROWS = 9
"""Features of a tile."""
WARMUP = pb.WarmupRequest(
    max_batch_prefill_tokens=64, max_batch_size=4, max_concurrent_requests=4, max_total_tokens=90
)
FEATURE_ROWS = 2043
"""A sixteenth of 8 MiB, in whole tiles of rows of 256 bytes; the largest image would have more."""


@dataclass
class Shard:
    """A server over a tiny model that reads images."""

    stub: pb_grpc.ShardServiceStub
    folder: Path
    model: PreTrainedModel
    epoch: int = 70
    number: int = 0
    requests: SimpleQueue[pb.StepRequest | None] = field(default_factory=SimpleQueue)

    def open(self) -> None:
        """Open an epoch on a new stream."""
        self.requests.put(None)
        self.epoch, self.number = self.epoch + 1, -1
        self.requests = SimpleQueue()
        self.call = self.stub.Steps(iter(self.requests.get, None), timeout=SECONDS)
        self.step(open=pb.Open())

    def answer(self, **work: object) -> pb.StepResponse:
        self.number += 1
        self.requests.put(pb.StepRequest(epoch=self.epoch, number=self.number, **work))  # type: ignore[arg-type]
        answer: pb.StepResponse = next(self.call)
        return answer

    def step(self, **work: object) -> pb.StepResponse:
        answer = self.answer(**work)
        assert not answer.HasField("error"), answer.error.message
        return answer

    def put(self, pixels: Pixels, *, part: int = 500, **fields: Any) -> str:
        """The error of PutImage, or nothing."""
        tiles, _, height, width = pixels.shape
        data, sizes = pixels.tobytes(), {"num_tiles": tiles, "height": height, "width": width}
        first: dict[str, Any] = {"epoch": self.epoch, "digest": b"d" * 32} | sizes | fields
        messages = [
            pb.PutImageRequest(pixels=data[:part], **first),
            *(
                pb.PutImageRequest(pixels=data[at : at + part])
                for at in range(part, len(data), part)
            ),
        ]
        return self.stub.PutImage(iter(messages), timeout=SECONDS).error

    def answer_to(self, prompt: Prompt, slot: int = 0) -> pb.StepResponse:
        """The step that computes all of a prompt, whose features are there."""
        count = -(-(len(prompt.ids) + 1) // 16)
        change = pb.BatchChange(
            admitted=[
                pb.Sequence(
                    slot=slot,
                    request_id=slot,
                    input_ids=prompt.ids,
                    images=[
                        pb.ImageSpan(position=at, tokens=tokens, first_row=row)
                        for at, tokens, row in prompt.spans
                    ],
                )
            ],
            grown_slots=[slot] * count,
            grown_blocks=range(1, 1 + count),
        )
        prefill = pb.Prefill(change=change, chunk_slots=[slot], chunk_tokens=[len(prompt.ids)])
        return self.step(prefill=prefill)


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    folder = tmp_path / "model"
    base = save_tiny_vision(folder, "smolvlm")
    kernels = PlainKernels(deterministic=True)
    engine = Engine(limits=MemoryLimits(kv_memory=1 << 23), device=CPU, cpu_threads=1)
    engine.start()

    def load() -> LoadedModel:
        return LoadedModel(
            model=read_model(folder, kernels),
            kernels=kernels,
            group=ProcessGroup.single(),
            device=CPU,
            dtype=torch.float32,
            vision=load_vision(
                spec_of(folder), folder, dtype=torch.float32, kernels=kernels, device=CPU
            ),
        )

    engine.attach(engine.submit(load).result(SECONDS))
    address = f"unix:{tmp_path}/shard"
    service = ShardService(engine, deterministic=True, prefill_logprobs=False, end=lambda: None)
    server = new_server(service, address)
    server.start()
    channel = grpc.insecure_channel(address)
    shard = Shard(pb_grpc.ShardServiceStub(channel), folder, base)
    yield shard
    shard.requests.put(None)
    channel.close()
    server.stop(grace=None).wait(SECONDS)
    engine.close()


@pytest.fixture
def warm(shard: Shard) -> Shard:
    assert shard.stub.Warmup(WARMUP, timeout=SECONDS).feature_rows == FEATURE_ROWS
    shard.open()
    return shard


def test_info_says_which_tiles_are_read(shard: Shard) -> None:
    vision = shard.stub.Info(pb.InfoRequest(), timeout=SECONDS).vision
    assert (vision.family, vision.rows_per_tile) == ("smolvlm", ROWS)
    assert (vision.tile_height, vision.tile_width) == (24, 24)
    assert vision.image_token_id == IMAGE_TOKEN
    assert vision.digest


def test_a_prompt_with_images_has_the_token_of_transformers(warm: Shard) -> None:
    prompt = prompt_with([picture(2, seed=1), picture(1, seed=2)], ROWS)
    assert not warm.put(prompt.pictures[0], image_slot=3)
    assert not warm.put(prompt.pictures[1], image_slot=1, first_row=2 * ROWS)
    encoded = warm.step(encode=pb.Encode(image_slots=[3, 1, 3], units=[1, 0, 0]))
    assert encoded.checksum
    assert not encoded.failed_images
    expected = prompt.logits(warm.model, spec_of(warm.folder))[-1]
    answer = warm.answer_to(prompt)
    assert list(answer.ids) == [int(expected.argmax())]
    assert list(answer.logprobs) == pytest.approx([float(expected.log_softmax(-1).max())], abs=1e-4)


def test_equal_tiles_have_equal_checksums(warm: Shard) -> None:
    pixels, checksums = picture(2, seed=1), []
    assert not warm.put(pixels, image_slot=0)
    assert not warm.put(pixels[:1], image_slot=1, first_row=4 * ROWS)
    for slot, unit in ((0, 0), (1, 0), (0, 1)):
        encode = pb.Encode(image_slots=[slot], units=[unit])
        checksums.append(warm.step(encode=encode).checksum)
    assert checksums[0] == checksums[1]
    assert checksums[0] != checksums[2]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_tiles": 3}, "3456 bytes of pixels came"),
        ({"num_tiles": 1}, "at least 2000 bytes of pixels came"),
        ({"height": 28}, "24 x 28 pixels"),
        ({"num_tiles": 1 << 31}, "tiles; 1 to"),
        ({"num_tiles": 0}, "tiles; 1 to"),
        ({"image_slot": 8}, "image slot 8"),
        ({"first_row": FEATURE_ROWS - ROWS}, "more than the 2043 rows"),
        ({"reduction": pb.GridReduction(columns=1)}, "not resampled by this model"),
    ],
)
def test_an_image_of_other_sizes_is_refused_and_steps_go_on(
    warm: Shard, fields: dict[str, Any], words: str
) -> None:
    assert words in warm.put(picture(2, seed=1), **fields)
    warm.step(filter_batch=pb.FilterBatch())


async def test_a_reduction_arrives_as_the_router_sends_it() -> None:
    sizes: dict[str, Any] = {"rows": 2, "columns": 1, "num_tiles": 3, "height": 8, "width": 8}
    reduction = GridReduction(columns=1, top=2, left=3, rows=4, row_size=5)
    sent = PreparedImage(digest=b"d", **sizes, rows_per_tile=9, pixels=b"", reduction=reduction)
    message = await anext(image_to_pb(1, 2, 3, sent))
    size = image_from_pb(message)
    assert (size.slot, size.first_row, size.num_tiles) == (2, 3, 3)
    assert size.reduction is not None
    assert asdict(size.reduction) == asdict(reduction)
    plain = await anext(image_to_pb(1, 2, 3, replace(sent, reduction=None)))
    assert image_from_pb(plain).reduction is None


def test_a_slot_has_its_image_until_it_is_freed(warm: Shard) -> None:
    one, other = picture(1, seed=1), picture(1, seed=2)
    assert not warm.put(one, image_slot=2)
    assert not warm.put(one, image_slot=2)
    assert "not freed" in warm.put(other, image_slot=2, digest=b"e" * 32)
    first = warm.step(encode=pb.Encode(image_slots=[2], units=[0]))
    warm.step(decode=pb.Decode(change=pb.BatchChange(freed_images=[2])))
    assert not warm.put(other, image_slot=2, digest=b"e" * 32, first_row=ROWS)
    assert warm.step(encode=pb.Encode(image_slots=[2], units=[0])).checksum != first.checksum


def test_images_of_another_epoch_are_refused(warm: Shard) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        warm.put(picture(1, seed=1), epoch=5)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_pixels_are_gone_after_an_epoch(warm: Shard) -> None:
    assert not warm.put(picture(1, seed=1), image_slot=0)
    warm.open()
    answer = warm.answer(encode=pb.Encode(image_slots=[0], units=[0]))
    assert "is not there" in answer.error.message


def test_a_replaced_shard_has_exactly_the_former_rows(shard: Shard) -> None:
    request = pb.WarmupRequest(feature_rows=7 * ROWS, num_blocks=40)
    request.MergeFrom(WARMUP)
    response = shard.stub.Warmup(request, timeout=SECONDS)
    assert (response.feature_rows, response.num_blocks) == (7 * ROWS, 40)
    assert response.image_slots
