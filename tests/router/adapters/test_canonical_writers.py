"""The fetching process writes what the tests of the shard write: the same tensors, layout and metadata."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from millrace_shard.adapters.packing import read_canonical
from millrace_testing.adapters.fetch_jobs import fetch_folder
from millrace_testing.adapters.peft_files import modules_of, save_adapter, tiny_gpt2, tiny_llama
from millrace_testing.models.adapters import write_canonical

LLAMA: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "target_modules": ["q_proj"]},
    "all-linear of rank 17": {"r": 17, "target_modules": "all-linear"},
    "lm_head and rslora": {"target_modules": ["lm_head", "v_proj"], "use_rslora": True, "r": 6},
    "mixed ranks": {
        "target_modules": ["k_proj", "down_proj"],
        "rank_pattern": {"k_proj": 3},
        "alpha_pattern": {"down_proj": 2.5},
    },
    "biases": {"target_modules": ["o_proj", "up_proj"], "lora_bias": True, "lora_alpha": 3},
}
GPT2: dict[str, dict[str, Any]] = {
    "fused": {"target_modules": ["c_attn"], "fan_in_fan_out": True, "r": 5},
    "all of Conv1D": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
}
CASES = [
    *(pytest.param(tiny_llama, fields, id=name) for name, fields in LLAMA.items()),
    *(pytest.param(tiny_gpt2, fields, id=name) for name, fields in GPT2.items()),
]


def parts(path: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Tensors by name with their places, the metadata, and the values."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    metadata = header.pop("__metadata__")
    return header, metadata | {"modules": json.loads(metadata["modules"])}, content[end:]


@pytest.mark.parametrize(("make", "fields"), CASES)
def test_both_writers_agree(
    make: Callable[[], Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    adapted: PeftModel = save_adapter(tmp_path / "a", model=make(), **fields)
    answer = fetch_folder(tmp_path / "a", tmp_path / "fetched", modules_of(make()))
    ours, theirs = answer["digest"], write_canonical(adapted, tmp_path / "written")
    name = "adapter.safetensors"
    fetched = parts(tmp_path / "fetched" / ours / name)
    assert fetched == parts(tmp_path / "written" / theirs / name)
    read = read_canonical(tmp_path / "fetched", ours)
    expected = read_canonical(tmp_path / "written", theirs)
    assert read.keys() == expected.keys() == {module for module, _, _ in answer["modules"]}
    for module, one in expected.items():
        assert torch.equal(read[module].a, one.a)
        assert torch.equal(read[module].b, one.b)
        assert torch.equal(read[module].scales, one.scales)
        assert (read[module].bias is None) == (one.bias is None)
