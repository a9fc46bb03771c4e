"""The weights of each format are those that its own library makes of the same tensors, which fixtures hold.

`millrace_testing.quantized.make_fixtures` has written them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from millrace_shard.weights.quantized.linear_reader import LinearReader
from millrace_shard.weights.quantized.module_tensors import Cut
from millrace_shard.weights.quantized.quantization_config import read_quantization
from millrace_shard.weights.safetensor_files import SafetensorFiles
from millrace_testing.models.models import edit_json

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.safetensors"))
NAME = "model.layers.0.self_attn.q_proj"


def test_there_are_fixtures() -> None:
    assert len(NAMES) > 20


@pytest.mark.parametrize("name", NAMES)
def test_weights_match_the_library(tmp_path: Path, name: str) -> None:
    path = FIXTURES / f"{name}.safetensors"
    tensors = load_file(path)
    expected = tensors.pop("expected")
    save_file(
        {f"{NAME}.{kind}": each for kind, each in tensors.items()}, tmp_path / "model.safetensors"
    )
    with safe_open(path, framework="pt") as file:
        config = json.loads(file.metadata()["config"])
    (tmp_path / "config.json").write_text("{}")
    edit_json(tmp_path / "config.json", quantization_config=config)
    quantization = read_quantization(tmp_path, None)
    assert quantization is not None
    reader = LinearReader(SafetensorFiles(tmp_path), quantization, lambda *_: None)
    outputs, inputs = expected.shape
    cut = Cut(outputs=outputs, inputs=inputs, rows=(0, outputs), columns=(0, inputs))
    found = reader.read(f"{NAME}.weight", cut)
    assert found is not None
    if name == "llm-int8":
        # The library rounds the product with the largest magnitude before it divides by 127.
        torch.testing.assert_close(found.dequantized(), expected, rtol=2**-22, atol=0)
    else:
        assert torch.equal(found.dequantized().to(expected.dtype), expected)
