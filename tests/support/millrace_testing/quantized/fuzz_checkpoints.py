"""Mutates tiny quantised checkpoints and GGUF files: each is refused by one line, or loaded, and then it computes.

`python -m millrace_testing.quantized.fuzz_checkpoints COUNT SEED` tries COUNT mutations of each kind, and prints what
became of them. Memory of the process is limited, and a load that hangs ends it with the stack.
"""

from __future__ import annotations

import faulthandler
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from millrace_shard.errors import ModelError
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.models.description import ModelDescription
from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_testing.models.gguf_files import TinyGguf
from millrace_testing.models.models import Driver, read_model
from millrace_testing.mutations import mutated_file, mutated_gguf, mutated_json, mutated_tensor
from millrace_testing.quantized.checkpoints import save_mxfp4, save_quantized
from millrace_testing.quantized.linears import FORMATS

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
MORE_BYTES = 512 << 20
"""Memory that the process may take beside what it has when the checkpoints are written: each has less than 2 MB."""
HANG_SECONDS = 60
LONGEST_MESSAGE = 4000
MAX_TOTAL_TOKENS = 64
OTHER_FAMILIES = {
    "qwen3": "gptq",
    "gemma3_text": "awq",
    "phi3": "pack-quantized",
    "qwen3_moe": "nf4",
}
"""Families, each in a format, beside Llama in every format."""
EXPERTS = {"qwen3_moe": {"moe_intermediate_size": 64}}
SECTIONS = ("quantization_config", "rope_parameters")


class CheckpointFuzz:
    """Mutations of whole checkpoints in `folder`, loaded as the shard loads them."""

    def __init__(self, folder: Path) -> None:
        """Write the checkpoints."""
        self._folder = folder
        self._bases: dict[str, dict[str, bytes]] = {}
        for name in FORMATS:
            self._add(f"llama {name}", partial(save_quantized, family="llama", name=name))
        for family, name in OTHER_FAMILIES.items():
            sizes: dict[str, Any] = EXPERTS.get(family, {})
            self._add(
                f"{family} {name}", partial(save_quantized, family=family, name=name, **sizes)
            )
        self._add("gpt_oss mxfp4", save_mxfp4)
        path = TinyGguf("llama", "Q4_0", hidden_size=64, intermediate_size=64).write(folder / "m")
        self._gguf = path.read_bytes()

    def header(self, random_: random.Random) -> str:
        """Mutate a safetensors file, of which half stay valid; returns what became of it."""
        files = self._any(random_)
        mutate = random_.choice((mutated_file, mutated_tensor))
        return self._load({**files, WEIGHTS: mutate(files[WEIGHTS], random_)})

    def config(self, random_: random.Random) -> str:
        """Mutate config.json, often one of its objects; returns what became of it."""
        files = self._any(random_)
        config: dict[str, Any] = json.loads(files[CONFIG])
        section = random_.choice((None, *SECTIONS))
        if section is None or section not in config:
            changed = mutated_json(files[CONFIG], random_)
        else:
            text = mutated_json(json.dumps(config.pop(section)).encode(), random_)
            changed = json.dumps(config)[:-1].encode() + f', "{section}": '.encode() + text + b"}"
        return self._load({**files, CONFIG: changed})

    def gguf(self, random_: random.Random) -> str:
        """Mutate the header of a GGUF file; returns what became of it."""
        path = self._folder / "mutated.gguf"
        path.write_bytes(mutated_gguf(self._gguf, random_))
        return _outcome(lambda: _run(prepare_gguf(path, self._folder / "prepared", tokenizer=None)))

    def check_bases(self) -> None:
        """Assert that unchanged checkpoints load."""
        for name, files in self._bases.items():
            assert self._load(files) == "loaded", name

    def _add(self, name: str, save: Callable[[Path], object]) -> None:
        path = self._folder / "base"
        save(path)
        self._bases[name] = {file: (path / file).read_bytes() for file in (CONFIG, WEIGHTS)}

    def _any(self, random_: random.Random) -> dict[str, bytes]:
        return self._bases[random_.choice(list(self._bases))]

    def _load(self, files: Mapping[str, bytes]) -> str:
        folder = self._folder / "mutated"
        folder.mkdir(exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return _outcome(lambda: _run(folder))


def _outcome(load: Callable[[], None]) -> str:
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    try:
        load()
    except ModelError as error:
        message = str(error)
        assert message
        assert message.isprintable(), message
        assert len(message) < LONGEST_MESSAGE, message
        return "refused"
    finally:
        faulthandler.cancel_dump_traceback_later()
    return "loaded"


def _run(folder: Path) -> None:
    """Read a checkpoint as the shard does, and compute three tokens, or as many as it has positions."""
    model = ModelDescription.read(folder)
    model.layer_shape(1)
    kernels = PlainKernels(deterministic=True)
    loaded = read_model(folder, kernels, max_total_tokens=MAX_TOTAL_TOKENS)
    with torch.inference_mode():
        driver = Driver(loaded, kernels, dtype=torch.float32, num_blocks=4)
        driver.generate([[0] * min(3, loaded.info.max_position_embeddings)], 1)


def limit_memory() -> None:
    """From now on an allocation of more than MORE_BYTES fails in this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    """Run as a command."""
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    began, found = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        fuzz = CheckpointFuzz(Path(name))
        fuzz.check_bases()
        limit_memory()
        for kind, mutate in (("header", fuzz.header), ("config", fuzz.config), ("gguf", fuzz.gguf)):
            for number in range(count):
                case = f"{kind} {seed}/{number}"
                try:
                    found[f"{kind} {mutate(random.Random(case))}"] += 1
                except BaseException:
                    sys.stderr.write(f"mutation {case}:\n")
                    raise
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    seconds = time.monotonic() - began
    sys.stdout.write(f"{count} of each in {seconds:.0f} s, {peak} MiB at most: {dict(found)}\n")


if __name__ == "__main__":
    main()
