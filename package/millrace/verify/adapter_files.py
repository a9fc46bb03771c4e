"""Writes random LoRA adapters in PEFT's format, for linear layers with Llama's names, or DeepSeek's of latents."""

from __future__ import annotations

import json
import random
import re
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from millrace_launcher.settings.commands import Programs

LINEAR = re.compile(
    r"(?P<module>(?:\w+\.)*layers\.\d+\.(?:self_attn|mlp)\.(?P<target>[qkvo]_proj|gate_proj|up_proj|down_proj"
    r"|q_[ab]_proj|kv_a_proj_with_mqa))\.weight"
)
TARGETS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "verify-wide": (
        8,
        (
            *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),
        ),
    ),
    "verify-narrow": (20, ("q_proj", "v_proj", "kv_a_proj_with_mqa")),
}
"""Rank and target modules by name of the adapter."""
A_EXPONENT, B_EXPONENT = 61, 60
"""Upper seven exponent bits of A's and B's values: magnitudes from 2**-5 to 2**-3, and from 2**-7 to 2**-5."""
SIZE = struct.Struct("<Q")


class NoAdapters(Exception):  # noqa: N818
    """No adapter can be made for the model."""


def write_adapters(checkpoint: Path, folder: Path) -> dict[str, Path]:
    """Write the adapters of `TARGETS` below `folder`; returns their folders by name. Raises NoAdapters."""
    shapes = linears(checkpoint)
    if not shapes:
        raise NoAdapters("the checkpoint has no linear layers of known names")
    return {
        name: write_adapter(
            folder / name,
            {m: shape for m, shape in shapes.items() if m.rpartition(".")[2] in targets},
            rank=rank,
        )
        for name, (rank, targets) in TARGETS.items()
    }


def linears(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the linear layers by name, from the headers of the safetensors files."""
    found = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = SIZE.unpack(file.read(SIZE.size))
            header = json.loads(file.read(length))
        for name, tensor in header.items():
            match = LINEAR.fullmatch(name)
            if match is not None and len(tensor["shape"]) == 2:
                found[match["module"]] = (tensor["shape"][0], tensor["shape"][1])
    return found


def write_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]], *, rank: int) -> Path:
    """Write one adapter with random bfloat16 weights, the same for the same name of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    drawing = random.Random(folder.name)  # noqa: S311
    header: dict[str, object] = {}
    parts: list[bytes] = []
    end = 0
    for module, (outputs, inputs) in shapes.items():
        for kind, shape, exponent in (
            ("lora_A", (rank, inputs), A_EXPONENT),
            ("lora_B", (outputs, rank), B_EXPONENT),
        ):
            parts.append(_bfloat16(drawing, shape, exponent))
            start, end = end, end + len(parts[-1])
            header[f"base_model.model.{module}.{kind}.weight"] = {
                "dtype": "BF16",
                "shape": shape,
                "data_offsets": (start, end),
            }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({module.rpartition(".")[2] for module in shapes}),
    }
    words = json.dumps(header).encode()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(
        b"".join((SIZE.pack(len(words)), words, *parts))
    )
    return folder


def checkpoint_of(
    model: str, revision: str | None = None, program: Sequence[str] = Programs().shard
) -> Path:
    """The folder of a model, which may be a name on the hub. Raises NoAdapters."""
    if Path(model).is_dir():
        return Path(model)
    chosen = [] if revision is None else [f"--revision={revision}"]
    done = subprocess.run(  # noqa: S603
        [*program, "download-weights", model, "--json-output", *chosen],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        return Path(json.loads(done.stdout.splitlines()[-1])["model_folder"])
    except (LookupError, ValueError, TypeError):
        raise NoAdapters(f"the folder of {model} is not known") from None


def _bfloat16(drawing: random.Random, shape: tuple[int, int], exponent: int) -> bytes:
    """Random signs, mantissas and lowest exponent bits."""
    data = bytearray(drawing.randbytes(2 * shape[0] * shape[1]))
    upper = bytes(bits & 0x80 | exponent for bits in range(256))
    data[1::2] = data[1::2].translate(upper)
    return bytes(data)
