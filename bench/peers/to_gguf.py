"""`python -m bench.peers.to_gguf MODEL TARGET`: llama.cpp's converter, in its own environment.

The converter identifies pre-tokenizers by the hash of a tokenized test text, and does not know ours. This module
names it GPT-2's. Benchmarks send token ids, so the name has no effect.
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from pathlib import Path

from bench.harness.paths import PEERS_FOLDER

SOURCE = PEERS_FOLDER / "llama" / "source"


def main() -> None:
    """Convert to bfloat16; the file takes its name once it is whole."""
    model, target = Path(sys.argv[1]), Path(sys.argv[2])
    unfinished = target.with_suffix(".unfinished")
    sys.path.insert(1, str(SOURCE))
    base = import_module("conversion.base")
    base.TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", str(model), f"--outfile={unfinished}", "--outtype=bf16"]
    runpy.run_path(str(SOURCE / "convert_hf_to_gguf.py"), run_name="__main__")
    unfinished.rename(target)


if __name__ == "__main__":
    main()
