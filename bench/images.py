"""`python -m bench.images`: preparing a picture and encoding a tile, against transformers in turn; `--streams`: stalls.

The picture is a JPEG of 1024 x 768 pixels; ours makes uint8 tiles in the process that decodes, transformers' PIL class
makes normalised float32. The tile has 512 x 512 pixels, and the encoder the shape of SmolVLM-256M's with random weights
in bfloat16; its floor is the time of its operations at the rate of a square product, measured in turn with it.
transformers and the product have bfloat16, or float32 where torch only emulates bfloat16. With one thread the encoders
are timed in CPU time of the thread, so that other load matters little.

`--streams` starts a server of SmolVLM-256M's shape, and takes the time between tokens of streams, first without and
then with pictures of 13 tiles, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path

import httpx
import numpy as np
import torch
from demo.train_reader import new_tokenizer, save_tokenizer
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from bench.comparison.roofline_probe import SIDE, multiplied_type
from bench.harness.server import serving
from millrace_router.images.child import DecodingError, DecodingLimits, DecodingProcess
from millrace_router.images.geometry import Geometry
from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.vision.encoder import load_vision
from millrace_shard.vision.registry import read_vision

TILE, SIZE = 512, (1024, 768)
PROCESSOR = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"longest_edge": 4 * TILE},
    "max_image_size": {"longest_edge": TILE},
}
ENCODER: dict[str, int] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": TILE,
    "patch_size": 16,
}
TEXT_WIDTH = 576
TEXT = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": TEXT_WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
WHOLE = {
    "vocab_size": 49280,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "max_position_embeddings": 8192,
}
"""Fields of the language model in addition to `TEXT`."""
SHUFFLE = 4
"""A token is made of so many patches in each direction."""
NUM_STREAMS, STREAM_TOKENS = 4, 200
BOMB_SIDE = 12_000


def medians(rounds: int, *calls: Callable[[], object]) -> list[float]:
    """Median seconds of each call, in turn; CPU time of this thread with one thread."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, own in zip(calls, times, strict=True):
            begin = clock()
            call()
            own.append(clock() - begin)
    return [statistics.median(own[1:]) for own in times]


def file_of(image: Image.Image, kind: str) -> bytes:
    """The bytes of a file."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


async def prepare(rounds: int) -> tuple[float, float, float]:
    """Median seconds of the decoding process, of the PIL class, and of refusing a bomb."""
    noise = np.random.default_rng(0).integers(0, 256, (96, 128, 3), dtype=np.uint8)
    jpeg = file_of(Image.fromarray(noise).resize(SIZE), "JPEG")
    bomb = file_of(Image.new("1", (BOMB_SIDE, BOMB_SIDE)), "PNG")
    theirs = SmolVLMImageProcessorPil(**PROCESSOR)
    process = DecodingProcess(Geometry.of("smolvlm", PROCESSOR), DecodingLimits())
    times: list[list[float]] = [[], [], []]
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        await process.decode(jpeg, "auto")
        times[0].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        theirs(Image.open(io.BytesIO(jpeg)).convert("RGB"), return_tensors="pt")
        times[1].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        with suppress(DecodingError):
            await process.decode(bomb, "auto")
        times[2].append(time.perf_counter() - begin)
    await process.close()
    ours, pil, refused = (statistics.median(own[1:]) for own in times)
    return ours, pil, refused


def operations() -> int:
    """Operations of the linears and the attention of a tile."""
    width, inter = ENCODER["hidden_size"], ENCODER["intermediate_size"]
    patches = (TILE // ENCODER["patch_size"]) ** 2
    linears = 2 * patches * (4 * width**2 + 2 * width * inter)
    attention = 4 * patches**2 * width
    ends = 2 * patches * width * (3 * ENCODER["patch_size"] ** 2 + TEXT_WIDTH)
    return ENCODER["num_hidden_layers"] * (linears + attention) + ends


def encode(rounds: int) -> tuple[float, float, float]:
    """Median seconds of one tile: our encoder, transformers', and the floor."""
    config = AutoConfig.for_model(
        "smolvlm", text_config=TEXT, vision_config=ENCODER, scale_factor=SHUFFLE, image_token_id=255
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        folder = Path(name)
        model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
        spec = read_vision(folder)
        assert spec is not None
        kernels, device = CpuKernels(deterministic=True), torch.device("cpu")
        vision = load_vision(spec, folder, dtype=torch.bfloat16, kernels=kernels, device=device)
    assert vision is not None
    pixels = np.random.default_rng(0).integers(0, 256, (3, TILE, TILE), dtype=np.uint8)
    dtype = multiplied_type()
    model = model.to(dtype)
    values = (torch.from_numpy(pixels).float() / 127.5 - 1).to(dtype)[None, None]
    square = torch.randn(SIDE, SIDE).to(dtype)
    ours, theirs, product = medians(
        rounds,
        lambda: vision.encode(pixels),
        lambda: model.get_image_features(values),
        lambda: square @ square,
    )
    return ours, theirs, operations() * product / (2 * SIDE**3)


def write_model(folder: Path) -> None:
    """Write random weights of SmolVLM-256M's shape, with the tokens of the reader of `demo`."""
    tokenizer = new_tokenizer()
    config = AutoConfig.for_model(
        "smolvlm",
        text_config=TEXT | WHOLE,
        vision_config=ENCODER,
        scale_factor=SHUFFLE,
        image_token_id=tokenizer.token_to_id("<image>"),
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


async def gaps_of(url: str, client: httpx.AsyncClient, seed: int) -> list[float]:
    """Seconds between the tokens of one stream."""
    sampling = {"do_sample": True, "ignore_eos": True, "seed": seed}
    body = {
        "inputs": f"stream {seed}",
        "parameters": {"max_new_tokens": STREAM_TOKENS, **sampling},
    }
    gaps, last = list[float](), None
    async with client.stream("POST", f"{url}/generate_stream", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                now = time.perf_counter()
                gaps += [] if last is None else [now - last]
                last = now
    return gaps


async def ask_about_pictures(url: str, client: httpx.AsyncClient) -> None:
    """Ask about one picture of 13 tiles after the other until cancelled."""
    with suppress(asyncio.CancelledError):
        for count in itertools.count():
            noise = np.random.default_rng(count).integers(0, 256, (48, 64, 3), dtype=np.uint8)
            content = base64.b64encode(file_of(Image.fromarray(noise).resize(SIZE), "JPEG"))
            part = {"url": f"data:image/jpeg;base64,{content.decode()}"}
            parts = [{"type": "image_url", "image_url": part}]
            body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
            answer = await client.post(f"{url}/v1/chat/completions", json=body)
            answer.raise_for_status()


async def stalls(url: str) -> None:
    """Print quantiles of the time between tokens, without and with pictures."""
    print("| a picture is encoded | p50, ms | p99, ms | most, ms |\n|---|--:|--:|--:|")
    async with httpx.AsyncClient(timeout=600) as client:
        await gaps_of(url, client, 0)
        for with_pictures in (False, True):
            asking = asyncio.create_task(ask_about_pictures(url, client)) if with_pictures else None
            streams = (gaps_of(url, client, seed) for seed in range(1, NUM_STREAMS + 1))
            gaps = sorted(chain.from_iterable(await asyncio.gather(*streams)))
            if asking is not None:
                asking.cancel()
                await asking
            p50, p99 = (1e3 * gaps[int(len(gaps) * share)] for share in (0.5, 0.99))
            print(
                f"| {'yes' if with_pictures else 'no'} | {p50:.1f} | {p99:.1f} | {1e3 * gaps[-1]:.1f} |"
            )


def main() -> None:
    """Print medians, or quantiles of the streams."""
    parser = argparse.ArgumentParser(prog="python -m bench.images", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--streams", action="store_true")
    arguments = parser.parse_args()
    if arguments.streams:
        with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
            folder = Path(name)
            write_model(folder)
            with serving(folder, log=folder / "log", flags=("--max-total-tokens=4096",)) as server:
                asyncio.run(stalls(server.url))
        return
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    load_operators()
    ours, pil, bomb = asyncio.run(prepare(arguments.rounds))
    with torch.inference_mode():
        encoder, reference, floor = encode(arguments.rounds)
    print("| what | ours, ms | transformers, ms | transformers / ours | ours / floor |")
    print("|---|--:|--:|--:|--:|")
    print(
        f"| JPEG of {SIZE[0]} x {SIZE[1]} to tiles | {1e3 * ours:.0f} | {1e3 * pil:.0f} | {pil / ours:.2f} | |"
    )
    print(f"| PNG of {BOMB_SIDE}² pixels, refused | {1e3 * bomb:.1f} | | | |")
    times = f"{1e3 * encoder:.0f} | {1e3 * reference:.0f} | {reference / encoder:.2f} | {encoder / floor:.2f}"
    print(f"| a tile, {arguments.threads} threads | {times} |")


if __name__ == "__main__":
    main()
