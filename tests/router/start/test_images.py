"""The start of a router whose model reads images, up to an answer that depends on the pixels."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from millrace_router.config import RouterConfig
from millrace_router.images.geometry import AROUND, GLOBAL, IMAGE
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.images import ImageSource
from millrace_router.request.limits import dialect_of
from millrace_router.start.images import PAYLOAD_LIMIT
from millrace_router.start.running import start
from millrace_router.start.shards import StartupError
from millrace_router.telemetry.instruments import render
from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_testing.models.mmproj_files import TinyPair
from millrace_testing.router.fake_router import tiny_tokenizer
from millrace_testing.shards.fake_images import EDGE, FakeImages
from millrace_testing.shards.fake_shard import FakeShard, serve_fake_shard

PROCESSOR = {"size": {"longest_edge": 2 * EDGE}, "max_image_size": {"longest_edge": EDGE}}


def write_model(
    folder: Path, processor: dict[str, Any] | None = PROCESSOR, *, nested: bool = False
) -> None:
    rust = tiny_tokenizer()._rust
    # The placeholder is one of the fake shard's ids, so its token has to be there already.
    parsed = json.loads(rust.to_str())
    vocab = parsed["model"]["vocab"]
    for text, id_ in ((IMAGE, 94), (AROUND, 93), (GLOBAL, 92)):
        vocab[text] = vocab.pop(f"▁w{id_}", id_)
    (folder / "tokenizer.json").write_text(json.dumps(parsed))
    rust = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    rust.add_special_tokens([AddedToken(text, special=True) for text in (IMAGE, AROUND, GLOBAL)])
    rust.save(str(folder / "tokenizer.json"))
    if processor is not None and nested:
        newer = {"processor_class": "SmolVLMProcessor", "image_processor": processor}
        (folder / "processor_config.json").write_text(json.dumps(newer))
    elif processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def config_of(folder: Path, **flags: Any) -> RouterConfig:
    usual: dict[str, Any] = {
        "model_folder": folder,
        "max_concurrent_requests": 4,
        "max_batch_size": 4,
    }
    return RouterConfig(**usual, shard_addresses=(f"unix:{folder}/shard",), **flags)


def png(color: str) -> str:
    file = io.BytesIO()
    Image.new("RGB", (4, 3), color).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def seeing(**options: Any) -> FakeShard:
    return FakeShard(
        max_batch_size=8, images=FakeImages(**{"num_rows": 32, "num_slots": 2, **options})
    )


@pytest.mark.parametrize("nested", [False, True])
async def test_a_started_router_answers_by_the_pixels(tmp_path: Path, nested: bool) -> None:
    write_model(tmp_path, nested=nested)
    shard = seeing()
    with serve_fake_shard(f"unix:{tmp_path}/shard", shard):
        running = await start(config_of(tmp_path))
        try:
            services = running.services
            assert services.config.payload_limit == PAYLOAD_LIMIT
            assert services.dialect == dialect_of(strict_tgi=False, reads_images=True)
            answers = []
            for color in ("red", "blue", "red"):
                images = await services.images.prepare([ImageSource(png(color), "inputs")])
                prompt = services.images.joined([{"type": "image"}], images)
                request = GenerationRequest(prompt=prompt, images=images, max_new_tokens=5, seed=1)
                collected = await services.infer.generate(request)
                answers.append([event.token.id for event in collected.tokens])
            exposition = render(services.metrics.registry)
        finally:
            await running.stop_batcher()
            await running.close()
    assert answers[0] == answers[2] != answers[1]
    assert shard.images.num_puts == 2
    assert len(shard.images.encoded) == 2 * 5
    assert b"millrace_image_tiles_encoded_total 10" in exposition


@pytest.mark.parametrize(
    ("processor", "options", "flags", "message"),
    [
        (None, {}, {}, "preprocessor_config.json, which models with images need, cannot be read"),
        ({**PROCESSOR, "resample": 3}, {}, {}, "`resample` has to be 1"),
        ({**PROCESSOR, "max_image_size": {"longest_edge": 7}}, {}, {}, "has tiles of 7 pixels"),
        (
            PROCESSOR,
            {"num_rows": 9},
            {},
            "the shards have 9 rows for features, and an image may need 10",
        ),
        (
            PROCESSOR,
            {},
            {"allow_special_tokens_in_content": True},
            "--allow-special-tokens-in-content",
        ),
    ],
)
async def test_a_model_that_does_not_fit_ends_the_start(
    tmp_path: Path,
    processor: dict[str, Any] | None,
    options: dict[str, int],
    flags: dict[str, Any],
    message: str,
) -> None:
    write_model(tmp_path, processor)
    with (
        serve_fake_shard(f"unix:{tmp_path}/shard", seeing(**options)),
        pytest.raises(StartupError, match=message),
    ):
        await start(config_of(tmp_path, **flags))


@pytest.mark.parametrize(("family", "lacks"), [("qwen2_vl", True), ("idefics3", False)])
async def test_the_text_of_a_gguf_model_for_images_lacks_their_encoder(
    family: str, lacks: bool, tmp_path: Path
) -> None:
    text = TinyPair(family, tmp_path / "hf").text.write(tmp_path / "m.gguf")
    prepared, folder = prepare_gguf(text, tmp_path / "cache", tokenizer=None), tmp_path / "served"
    folder.mkdir()
    write_model(folder, None)
    for name in ("config.json", "model.gguf"):
        (folder / name).symlink_to(prepared / name)
    with serve_fake_shard(f"unix:{folder}/shard", FakeShard(max_batch_size=8)):
        running = await start(config_of(folder))
        try:
            dialect = running.services.dialect
        finally:
            await running.stop_batcher()
            await running.close()
    assert dialect == dialect_of(strict_tgi=False, lacks_encoder=lacks)


@pytest.mark.parametrize(
    "hosts", ["http://a.example", "a.example:80", "a.example/x", "127.0.0.1", "*"]
)
def test_hosts_of_images_are_names(hosts: str) -> None:
    flags: dict[str, Any] = {"model_folder": Path(), "image_url_hosts": hosts}
    with pytest.raises(ValueError, match="is not the name of a host"):
        RouterConfig(**flags)


def test_hosts_of_images_are_lowered_and_split() -> None:
    flags: dict[str, Any] = {"model_folder": Path(), "image_url_hosts": "A.example,b.example"}
    config = RouterConfig(**flags)
    assert config.image_url_hosts == ("a.example", "b.example")
