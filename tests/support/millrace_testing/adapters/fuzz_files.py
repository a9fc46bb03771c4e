"""Mutates the files of adapters: each is refused, or accepted with the tensors that its header describes.

`python -m millrace_testing.adapters.fuzz_files COUNT SEED` tries COUNT mutations of each kind, and prints what it took.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from millrace_router.adapters.fetching.canonical import check_adapter
from millrace_router.adapters.fetching.errors import Invalid
from millrace_router.adapters.fetching.jobs import answer
from millrace_router.adapters.fetching.peft_config import PeftConfig
from millrace_router.adapters.fetching.tensors import parse_safetensors
from millrace_router.request.adapter import AdapterModule
from millrace_testing.adapters.fetch_jobs import fetch_request
from millrace_testing.mutations import mutated_file, mutated_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
LONGEST_MESSAGE = 2000
FOLDER_PERIOD = 50
"""Mutations in memory for each one on disk."""


def check_header(data: bytes) -> bool:
    """Whether a file is accepted; asserts that its tensors are the bytes at their offsets, and that all are used."""
    try:
        file = parse_safetensors(data)
    except Invalid as error:
        check_message(str(error))
        return False
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    assert file.tensors.keys() == header.keys(), data
    for name, tensor in file.tensors.items():
        begin, end = header[name]["data_offsets"]
        ours = (tensor.dtype, list(tensor.shape), bytes(tensor.data))
        theirs = (header[name]["dtype"], header[name]["shape"], data[start + begin : start + end])
        assert ours == theirs, data
    assert sum(tensor.data.nbytes for tensor in file.tensors.values()) == len(data) - start, data
    return True


def check_message(message: str) -> None:
    """Assert that a refusal is one line of bounded length, and not empty."""
    assert message
    assert message.isprintable(), message
    assert len(message) < LONGEST_MESSAGE, message


class AdapterFuzz:
    """Mutated adapters, checked as the process checks them; without its limits, so a hang or a crash is found here."""

    def __init__(self, good: Path, modules: Sequence[AdapterModule], folder: Path) -> None:
        self._folder = folder
        self._modules = modules
        self._good = {name: (good / name).read_bytes() for name in (CONFIG, WEIGHTS)}
        self._request = fetch_request(folder / "a", folder / "cache", modules)

    def check(self, random_: random.Random) -> str:
        """Check one mutation in memory; returns the kind of the answer."""
        files = self._mutated(random_)
        try:
            config = PeftConfig.parse(files[CONFIG])
            file = parse_safetensors(files[WEIGHTS])
            found = check_adapter(config, file, modules=self._modules, max_rank=64)
        except Invalid as error:
            check_message(str(error))
            return "invalid"
        shapes = {module.name: (module.inputs, module.outputs) for module in self._modules}
        for module in found:
            assert shapes[module.name] == (module.inputs, module.outputs)
            assert module.a.shape[0] == module.b.shape[1] == len(module.scales) == module.rank
        return "taken"

    def fetch(self, random_: random.Random) -> str:
        """Fetch one mutation from a folder; returns the kind of the answer."""
        (self._folder / "a").mkdir(exist_ok=True)
        for name, data in self._mutated(random_).items():
            (self._folder / "a" / name).write_bytes(data)
        answered = answer(self._request)
        if "digest" in answered:
            path = self._folder / "cache" / answered["digest"] / "adapter.safetensors"
            assert check_header(path.read_bytes())
            return "taken"
        assert answered["error"] in ("invalid", "too_large"), answered
        check_message(answered["reason"])
        return str(answered["error"])

    def _mutated(self, random_: random.Random) -> dict[str, bytes]:
        if random_.random() < 0.6:
            return self._good | {CONFIG: mutated_json(self._good[CONFIG], random_)}
        return self._good | {WEIGHTS: mutated_file(self._good[WEIGHTS], random_)}


def main() -> None:
    """Run as a command."""
    from millrace_testing.adapters.peft_files import modules_of, save_adapter, tiny_llama

    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    random_, began, taken = random.Random(seed), time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_adapter(folder / "good", target_modules=["q_proj"], r=2)
        weights = (folder / "good" / WEIGHTS).read_bytes()
        fuzz = AdapterFuzz(folder / "good", modules_of(tiny_llama()), folder)
        for number in range(count):
            taken["header taken"] += check_header(mutated_file(weights, random_))
            taken[f"adapter {fuzz.check(random_)}"] += 1
            if number % FOLDER_PERIOD == 0:
                taken[f"folder {fuzz.fetch(random_)}"] += 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    seconds = time.monotonic() - began
    sys.stdout.write(f"{count} of each in {seconds:.0f} s, {peak} MiB at most: {dict(taken)}\n")


if __name__ == "__main__":
    main()
