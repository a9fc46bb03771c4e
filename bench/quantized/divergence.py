"""`python -m bench.quantized.divergence`: the cost of rounding activations on a published model, against llama.cpp.

Everyone multiplies the codes of one GGUF file, such as SmolLM2-135M-Instruct in Q4_1, which `make serve MODEL=smollm2`
fetches. The truth is float32 by plain torch. The figures are of the token after beginnings of this repository's pages.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import httpx
import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.harness.paths import OUT, ROOT
from bench.harness.tables import markdown
from bench.peers.servers import HELD, HELP, Server, hold_to, servers_held_to
from bench.peers.worker import Limits
from millrace_proto.cores import usable_cores
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.agreement import ragged_batch
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.models.load import load_model
from millrace_shard.weights.gguf.folder import prepare_gguf

LENGTH = 48
CPU = torch.device("cpu")
SECONDS = 60.0


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.quantized.divergence", description=__doc__
    )
    parser.add_argument("file", type=Path, help="a GGUF file")
    parser.add_argument("--beginnings", type=int, default=40)
    parser.add_argument("--instruction-set", choices=tuple(HELD), help=HELP)
    arguments = parser.parse_args()
    hold_to(arguments.instruction_set)
    file = arguments.file
    folder = prepare_gguf(file, OUT / "gguf", tokenizer=None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prefixes = beginnings(tokenizer, arguments.beginnings)
    load_operators()
    truth = ours(folder, PlainKernels(deterministic=True), torch.float32, prefixes)
    found = {
        f"ours, {'int8' if integer else 'exact'} activations": ours(
            folder,
            CpuKernels(deterministic=True, integer=integer),
            torch.bfloat16,
            prefixes,
        )
        for integer in (False, True)
    }
    peers = {each.name: each for each in servers_held_to(arguments.instruction_set)}
    found["llama.cpp"] = theirs(peers["llama.cpp"], file, prefixes, truth.shape[1])
    rows = []
    for name, logprobs in found.items():
        kl = (truth.exp() * (truth - logprobs)).sum(-1)
        same = (truth.argmax(-1) == logprobs.argmax(-1)).double().mean()
        rows.append((name, f"{kl.mean():.2e}", f"{kl.max():.2e}", f"{same:.1%}"))
    print(markdown(("products", "mean KL, nats", "largest", "same best token"), rows))
    return 0


def beginnings(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Token ids [count, LENGTH]."""
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    stride = (len(ids) - LENGTH) // count
    return [ids[start : start + LENGTH] for start in range(0, count * stride, stride)]


def ours(folder: Path, kernels: Kernels, dtype: torch.dtype, prefixes: list[list[int]]) -> Tensor:
    """Log probabilities [len(prefixes), vocab] of the next token."""
    model = load_model(
        folder, dtype=dtype, kernels=kernels, group=ProcessGroup.single(), device=CPU
    )
    found = []
    for ids in prefixes:
        batch = ragged_batch([len(ids)], [len(ids)], block_size=kernels.block_size)
        cache = [
            layer.new_cache(kernels, int(batch.block_tables.max()) + 1, dtype, CPU)
            for layer in model.geometry.layers
        ]
        for layer in cache:
            kernels.zero_blocks(layer, torch.arange(len(layer.keys)))
        step = replace(batch, ids=torch.tensor(ids), logit_rows=torch.tensor([len(ids) - 1]))
        found.append(model.forward(step, cache).float().log_softmax(-1))
    return torch.cat(found)


def theirs(peer: Server, file: Path, prefixes: list[list[int]], size: int) -> Tensor:
    """The same of llama.cpp's server."""
    limits = Limits(
        max_streams=1, max_tokens=LENGTH + 8, kv_tokens=LENGTH + 8, threads=usable_cores()
    )
    found = torch.full((len(prefixes), size), -100.0)
    with (
        tempfile.TemporaryDirectory() as folder,
        peer.start(file, limits, Path(folder) / "log", ()) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        for row, ids in enumerate(prefixes):
            body = {
                "prompt": ids,
                "n_predict": 1,
                "n_probs": size,
                "temperature": 0,
                "cache_prompt": False,
            }
            answer = client.post("/completion", json=body).raise_for_status().json()
            for each in answer["completion_probabilities"][0]["top_logprobs"]:
                found[row, each["id"]] = each["logprob"]
    return found


if __name__ == "__main__":
    sys.exit(main())
