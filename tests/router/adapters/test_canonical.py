"""Adapters that PEFT saved become canonical files with PEFT's own arithmetic, or a refusal that names what is wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from millrace_router.adapters.fetching.canonical import base_module
from millrace_router.adapters.fetching.errors import Invalid
from millrace_router.adapters.fetching.tensors import parse_safetensors
from millrace_router.request.adapter import AdapterModule
from millrace_shard.adapters.packing import read_canonical
from millrace_testing.adapters.fetch_jobs import fetch_folder
from millrace_testing.adapters.peft_files import (
    canonical_deltas,
    deltas,
    modules_of,
    save_adapter,
    tiny_gpt2,
    tiny_llama,
)
from millrace_testing.models.adapters import write_canonical

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
Q0 = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]
LLAMA = modules_of(tiny_llama())

CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "all-linear": {"target_modules": "all-linear", "r": 5},
    "list": {"target_modules": ["o_proj", "gate_proj"], "lora_alpha": 3},
    "regex": {"target_modules": r".*\.1\.mlp\.(up|down)_proj"},
    "lm_head": {"target_modules": ["lm_head", "q_proj"]},
    "some layers": {"target_modules": ["v_proj", "k_proj"], "layers_to_transform": [1]},
    "excluded": {"target_modules": ["v_proj"], "exclude_modules": r".*\.0\..*"},
    "rslora": {"use_rslora": True, "r": 3, "lora_alpha": 16},
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"],
        "r": 4,
        "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 7, "k_proj": 2, "^model.*v_proj": 3},
        "alpha_pattern": {"down_proj": 32, r"1\..*k_proj": 2.5, "_proj": 99},
    },
    "patterns and rslora": {"rank_pattern": {"v_proj": 2}, "use_rslora": True},
    "gaussian": {"init_lora_weights": "gaussian"},
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_the_change_of_each_weight_is_pefts(fields: dict[str, Any], tmp_path: Path) -> None:
    model = save_adapter(tmp_path / "a", **fields)
    answer = fetch_folder(tmp_path / "a", tmp_path / "cache", LLAMA)
    path = tmp_path / "cache" / answer["digest"] / "adapter.safetensors"
    ours, theirs = canonical_deltas(path), deltas(model)
    assert theirs
    assert ours.keys() == theirs.keys()
    for name, delta in theirs.items():
        torch.testing.assert_close(ours[name], delta, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("targets", [["c_attn"], ["c_attn", "c_proj", "c_fc"]])
def test_fused_layers_of_the_class_conv1d_match_peft(targets: list[str], tmp_path: Path) -> None:
    model = save_adapter(
        tmp_path / "a", model=tiny_gpt2(), target_modules=targets, fan_in_fan_out=True
    )
    answer = fetch_folder(tmp_path / "a", tmp_path, modules_of(tiny_gpt2()))
    ours = canonical_deltas(tmp_path / answer["digest"] / "adapter.safetensors")
    assert ours.keys() == deltas(model).keys()
    for name, delta in deltas(model).items():
        torch.testing.assert_close(ours[name], delta, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_keep_their_dtype_and_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    save_adapter(tmp_path / "a")
    saved = {key: one.to(dtype) for key, one in load_file(tmp_path / "a" / WEIGHTS).items()}
    save_file(saved, tmp_path / "a" / WEIGHTS)
    answer = fetch_folder(tmp_path / "a", tmp_path, LLAMA)
    ours = load_file(tmp_path / answer["digest"] / "adapter.safetensors")
    for key, tensor in saved.items():
        name, part = key.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".", 1)
        assert ours[f"{name}.{part}"].dtype == dtype
        assert torch.equal(ours[f"{name}.{part}"], tensor)


def test_biases_have_their_factor(tmp_path: Path) -> None:
    model = save_adapter(tmp_path / "a", lora_bias=True, r=4, lora_alpha=2)
    answer = fetch_folder(tmp_path / "a", tmp_path, LLAMA)
    ours = load_file(tmp_path / answer["digest"] / "adapter.safetensors")
    layer = model.base_model.model.get_submodule(Q0)
    expected = layer.lora_B["default"].bias.detach() * layer.scaling["default"]
    assert torch.equal(ours[f"{Q0}.bias"], expected)
    assert [Q0, 4, True] in answer["modules"]


def test_the_file_has_the_format_that_shards_expect(tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", r=3, target_modules=["k_proj"])
    answer = fetch_folder(tmp_path / "a", tmp_path, LLAMA)
    path = tmp_path / answer["digest"] / "adapter.safetensors"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == answer["digest"]
    assert path.stat().st_size == answer["num_bytes"]
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "millrace-adapter-1"
    names = [f"model.layers.{layer}.self_attn.k_proj" for layer in (0, 1)]
    shape = {"rank": 3, "inputs": 16, "outputs": 8, "bias": False}
    assert json.loads(metadata["modules"]) == dict.fromkeys(names, shape)
    assert answer["modules"] == [[name, 3, False] for name in names]
    assert answer["note"] is None


def test_tensors_lie_where_their_values_are_aligned(tmp_path: Path) -> None:
    """Half of the values are of two bytes, and each tensor has an odd number of them."""
    only = [AdapterModule(name=Q0, inputs=5, outputs=3, bytes_per_slice=1)]
    save_adapter(tmp_path / "a", r=1, target_modules=["q_proj"])
    tensors = {A: torch.ones(1, 5, dtype=torch.bfloat16), B: torch.ones(3, 1)}
    save_file(tensors, tmp_path / "a" / WEIGHTS)
    answer = fetch_folder(tmp_path / "a", tmp_path, only)
    data = (tmp_path / answer["digest"] / "adapter.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    sizes = {"BF16": 2, "F32": 4}
    assert {
        name: one["data_offsets"][0] % sizes[one["dtype"]]
        for name, one in header.items()
        if name[0] != "_"
    } == {
        f"{Q0}.lora_A": 0,
        f"{Q0}.lora_B": 0,
        f"{Q0}.scales": 0,
    }


def test_one_meaning_is_one_version(tmp_path: Path) -> None:
    save_adapter(tmp_path / "a")
    first = fetch_folder(tmp_path / "a", tmp_path, LLAMA)
    path = tmp_path / first["digest"] / "adapter.safetensors"
    right = path.read_bytes()
    path.write_bytes(b"damaged")
    saved = load_file(tmp_path / "a" / WEIGHTS)
    odd = {key.replace(".weight", ".default.weight"): one for key, one in saved.items()}
    save_file(odd, tmp_path / "a" / WEIGHTS, metadata={"format": "other"})
    config = json.loads((tmp_path / "a" / CONFIG).read_text())
    changed = config | {"lora_dropout": 0.5, "base_model_name_or_path": "x", "lora_alpha": 8.0}
    (tmp_path / "a" / CONFIG).write_text(json.dumps(changed))
    second = fetch_folder(tmp_path / "a", tmp_path, LLAMA)
    assert second.pop("source_digest") != first.pop("source_digest")
    assert second == first
    assert path.read_bytes() == right
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a", first["digest"]])
    (tmp_path / "a" / CONFIG).write_text(json.dumps(changed | {"lora_alpha": 9}))
    assert fetch_folder(tmp_path / "a", tmp_path, LLAMA)["digest"] != first["digest"]


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: key.removeprefix("base_model.model."),
        lambda key: f"base_model.model.{key}",
        lambda key: key.replace("model.model.model", "model.model.language_model.model"),
        lambda key: key.replace("model.model.model", "model.model.model.language_model"),
        lambda key: key.replace("model.model.model", "model.model"),
        lambda key: key.replace(".weight", ".default.weight"),
    ],
)
def test_variants_of_keys_give_the_same_digest(
    rename: Callable[[str], str], tmp_path: Path
) -> None:
    save_adapter(tmp_path / "a")
    first = fetch_folder(tmp_path / "a", tmp_path, LLAMA)
    saved = load_file(tmp_path / "a" / WEIGHTS)
    renamed = {rename(key): one for key, one in saved.items()}
    assert renamed.keys() != saved.keys()
    save_file(renamed, tmp_path / "a" / WEIGHTS)
    assert fetch_folder(tmp_path / "a", tmp_path, LLAMA)["digest"] == first["digest"]


@pytest.mark.parametrize(
    ("trained", "published"),
    [
        ("model.layers.3.mixer.in_proj", "backbone.layers.3.mixer.in_proj"),
        ("backbone.layers.3.mixer.in_proj", "backbone.layers.3.mixer.in_proj"),
        ("model.layers.1.self_attn.forget_gate.f_a_proj", "model.layers.1.self_attn.f_a_proj"),
        (
            "model.layers.1.mlp.shared_experts.up_proj",
            "model.layers.1.block_sparse_moe.shared_experts.up_proj",
        ),
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("model.layers.1.mlp.experts.up_proj", None),
    ],
)
def test_modules_have_the_names_of_the_class_or_of_published_files(
    trained: str, published: str | None
) -> None:
    modules = (
        "backbone.layers.3.mixer.in_proj",
        "model.layers.1.self_attn.f_a_proj",
        "model.layers.1.block_sparse_moe.shared_experts.up_proj",
        "model.layers.0.mlp.up_proj",
    )
    assert base_module(trained, modules) == published


def test_targets_without_tensors_are_noted(tmp_path: Path) -> None:
    save_adapter(tmp_path / "a")
    edit_config(tmp_path / "a", target_modules=["q_proj", "v_proj", "mlp.x\n", "self_attn.v_proj"])
    answer = fetch_folder(tmp_path / "a", tmp_path, LLAMA)
    assert answer["note"] is not None
    assert answer["note"].endswith(r"without tensors: 'mlp.x\n'")


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))


A = f"base_model.model.{Q0}.lora_A.weight"
B = f"base_model.model.{Q0}.lora_B.weight"


def without(key: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: one for name, one in tensors.items() if name != key}


def changed(key: str, value: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {key: value}


def spoilt(value: float, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.zeros(8, 16, dtype=dtype)
    tensor[-1, -1] = value
    return tensor


BROKEN: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no B": (without(B), f"'{A}' comes without its lora_B"),
    "no A": (without(A), f"'{B}' comes without its lora_A"),
    "inputs": (changed(A, torch.zeros(8, 15)), rf"'{A}' has the shape [8, 15], .* needs [8, 16]"),
    "outputs": (changed(B, torch.zeros(17, 8)), rf"'{B}' has the shape [17, 8], .* needs [16, 8]"),
    "rank of A": (
        changed(A, torch.zeros(7, 16)),
        rf"'{A}' has the shape [7, 16], .* needs [8, 16]",
    ),
    "rank of B": (
        changed(B, torch.zeros(16, 9)),
        rf"'{B}' has the shape [16, 9], .* needs [16, 8]",
    ),
    "transposed": (changed(A, torch.zeros(16, 8)), "[16, 8]"),
    "dimensions": (changed(A, torch.zeros(8, 16, 1)), "[8, 16, 1]"),
    "nan": (
        changed(A, spoilt(float("nan"), torch.float32)),
        f"'{A}' has a value that is not finite",
    ),
    "inf": (changed(A, spoilt(float("-inf"), torch.float32)), "not finite"),
    "nan, half": (changed(A, spoilt(float("nan"), torch.float16)), "not finite"),
    "inf, half": (changed(A, spoilt(float("inf"), torch.float16)), "not finite"),
    "nan, bfloat16": (changed(A, spoilt(float("nan"), torch.bfloat16)), "not finite"),
    "inf, bfloat16": (changed(A, spoilt(float("-inf"), torch.bfloat16)), "not finite"),
    "inf as bfloat16": (changed(A, spoilt(3.4e38, torch.float32)), "not finite"),
    "unknown module": (
        changed(A.replace("q_proj", "z_proj"), torch.zeros(8, 16)),
        "'base_model.model.model.layers.0.self_attn.z_proj.lora_A.weight' is of a module that",
    ),
    "unknown layer": (changed(A.replace(".0.", ".2."), torch.zeros(8, 16)), "is of a module that"),
    "dora": (
        changed(f"base_model.model.{Q0}.lora_magnitude_vector", torch.zeros(16)),
        "lora_magnitude_vector' is of DoRA",
    ),
    "embedding": (
        changed("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(8, 40)),
        "changes an embedding",
    ),
    "whole layer": (
        changed("base_model.model.lm_head.weight", torch.zeros(40, 16)),
        "'base_model.model.lm_head.weight' replaces a weight",
    ),
    "bias of A": (changed(A.replace("weight", "bias"), torch.zeros(8)), "is not of LoRA"),
    "resized vocabulary": (
        changed(A.replace("lora_A", "base_layer"), torch.zeros(20, 16)),
        "has the shape [20, 16], .* needs [16, 16]",
    ),
    "copy alone": (
        changed("base_model.model.lm_head.base_layer.weight", torch.zeros(40, 16)),
        "comes without its lora_A",
    ),
    "surplus": (changed("x", torch.zeros(1)), "'x' is not of LoRA"),
    "bias": (
        changed(B.replace("weight", "bias"), torch.zeros(16)),
        "lora_bias of adapter_config.json",
    ),
    "twice": (
        changed(A.replace("base_model.model.", ""), torch.zeros(8, 16)),
        "are of the same module",
    ),
    "other dtype": (changed(A, torch.zeros(8, 16, dtype=torch.float64)), "the dtype 'F64'"),
    "integers": (changed(A, torch.zeros(8, 16, dtype=torch.int8)), "the dtype 'I8'"),
    "nothing": (lambda _: {}, "no tensors"),
    "many": (
        lambda tensors: (
            tensors | {f"{key}.{n}": one.clone() for key, one in tensors.items() for n in range(9)}
        ),
        "tensors, and the model 15 modules",
    ),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_each_defect_is_named(
    change: Callable[[Tensors], Tensors], message: str, tmp_path: Path
) -> None:
    save_adapter(tmp_path / "a")
    save_file(change(load_file(tmp_path / "a" / WEIGHTS)), tmp_path / "a" / WEIGHTS)
    answer = fetch_folder(tmp_path / "a", tmp_path / "cache", LLAMA)
    assert answer["error"] == "invalid"
    *before, after = message.split(".*")
    assert all(part.strip() in answer["reason"] for part in [*before, after])
    assert not (tmp_path / "cache").exists()
    again = fetch_folder(tmp_path / "a", tmp_path / "cache", LLAMA, known=answer["source_digest"])
    assert again == {"is_known": True}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 4}, "needs [4, 16]"),
        ({"rank_pattern": {"q_proj": 9}}, "needs [9, 16]"),
        ({"lora_bias": True}, "comes without its bias"),
        ({"lora_alpha": 1e300}, "lora_alpha"),
    ],
)
def test_the_configuration_must_fit_the_tensors(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_adapter(tmp_path / "a")
    edit_config(tmp_path / "a", **fields)
    answer = fetch_folder(tmp_path / "a", tmp_path, LLAMA)
    assert (answer["error"], message in answer["reason"]) == ("invalid", True)


def test_a_rank_above_the_limit_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", r=17)
    assert "digest" in fetch_folder(tmp_path / "a", tmp_path, LLAMA, max_rank=17)
    answer = fetch_folder(tmp_path / "a", tmp_path, LLAMA, max_rank=16)
    assert f"'{Q0}' is 17, and at most 16" in answer["reason"]


def test_a_bias_that_overflows_with_its_factor_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", lora_bias=True, lora_alpha=800, target_modules=["q_proj"])
    saved = load_file(tmp_path / "a" / WEIGHTS)
    bias = torch.full((16,), 3e37)
    save_file(saved | {B.replace("weight", "bias"): bias}, tmp_path / "a" / WEIGHTS)
    answer = fetch_folder(tmp_path / "a", tmp_path, LLAMA)
    assert answer["error"] == "invalid"
    assert "lora_B.bias' has a value that is not finite" in answer["reason"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "the disk of the adapter cache is full"),
        (errno.EDQUOT, "the disk of the adapter cache is full"),
        (errno.EIO, "the adapter cache cannot be written: Input/output error"),
    ],
)
def test_a_disk_that_fails_leaves_nothing_behind(
    number: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, "no")

    save_adapter(tmp_path / "a")
    monkeypatch.setattr(os, "fsync", fail)
    answer = fetch_folder(tmp_path / "a", tmp_path / "cache", LLAMA)
    assert (answer["error"], answer["reason"]) == ("unavailable", message)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_modules_come_in_the_models_order(tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", target_modules="all-linear", r=17)
    answer = fetch_folder(tmp_path / "a", tmp_path, LLAMA)
    names = [module.name for module in LLAMA if module.name != "lm_head"]
    assert [name for name, *_ in answer["modules"]] == names
    only = [AdapterModule(name=Q0, inputs=16, outputs=16, bytes_per_slice=1)]
    assert fetch_folder(tmp_path / "a", tmp_path, only)["error"] == "invalid"


LLAMA_MODULES: dict[str, dict[str, Any]] = {
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
WRITTEN = [
    *(pytest.param(tiny_llama, fields, id=name) for name, fields in LLAMA_MODULES.items()),
    *(pytest.param(tiny_gpt2, fields, id=name) for name, fields in GPT2.items()),
]


def parts(path: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Tensors by name with their places, the metadata, and the values."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    metadata = header.pop("__metadata__")
    return header, metadata | {"modules": json.loads(metadata["modules"])}, content[end:]


@pytest.mark.parametrize(("make", "fields"), WRITTEN)
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


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def file_of(header: Any, body: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(begin: int = 0, end: int = 8, **fields: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [begin, end]} | fields


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.text(max_size=9).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4)),
        max_size=5,
    )
)
def test_files_of_the_library_are_read(tensors: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    made = {name: torch.randn(shape).to(dtype) for name, (dtype, shape) in tensors.items()}
    data = save(made, metadata={"a": "b"})
    file = parse_safetensors(data)
    theirs = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    assert file.tensors.keys() == theirs.keys()
    assert file.metadata == {"a": "b"}
    for name, tensor in file.tensors.items():
        assert tensor.dtype == theirs[name]["dtype"]
        assert list(tensor.shape) == theirs[name]["shape"]
        assert bytes(tensor.data) == bytes(theirs[name]["data"])


WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut short"),
    "seven bytes": (b"\0" * 7, "cut short"),
    "header cut short": (file_of({}, length=100), "cut short"),
    "header too long": (file_of({}, length=(8 << 20) + 1), "has 8388609 bytes"),
    "header of 2^64": (file_of({}, length=(1 << 64) - 1), "bytes"),
    "not JSON": (file_of(b"{x}"), "is not JSON"),
    "a list": (file_of(b"[]"), "brace"),
    "no brace": (file_of(b" {}"), "brace"),
    "nothing": (file_of(b""), "brace"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "is not JSON"),
    "twice": (
        file_of(b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2), b"\0" * 8),
        "key 'a' twice",
    ),
    "field twice": (
        file_of(
            b'{"a": {"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"\0" * 8
        ),
        "key 'dtype' twice",
    ),
    "deep": (file_of(b"{" + b'"a":{' * 100_000 + b"}" * 100_001), "nested"),
    "gap": (
        file_of({"a": entry(), "b": entry(9, 17)}, b"\0" * 17),
        "invalid offset for tensor `b`",
    ),
    "overlap": (
        file_of({"a": entry(), "b": entry(4, 12)}, b"\0" * 12),
        "invalid offset for tensor `b`",
    ),
    "the same": (file_of({"a": entry(), "b": entry()}, b"\0" * 8), "invalid offset for tensor"),
    "a name of control characters, out of order": (
        file_of({"a\r\n\x1b" + "b" * 1000: entry(4, 12)}, b"\0" * 12),
        "invalid offset",
    ),
    "late": (file_of({"a": entry(4, 12)}, b"\0" * 12), "invalid offset for tensor `a`"),
    "cut short": (file_of({"a": entry()}, b"\0" * 7), "file not fully covered"),
    "more": (file_of({"a": entry()}, b"\0" * 9), "file not fully covered"),
    "no tensors, but bytes": (file_of({}, b"\0"), "file not fully covered"),
    "shape": (file_of({"a": entry(shape=[3])}, b"\0" * 8), "invalid shape"),
    "overflow": (file_of({"a": entry(0, 0, shape=[1 << 62, 4])}), "overflow"),
    "wide offsets": (
        file_of({"a": entry(0, 1 << 66, shape=[1 << 64])}),
        "expected usize",
    ),
    "backwards": (file_of({"a": entry(8, 0)}, b"\0" * 8), "invalid offset for tensor `a`"),
    "three offsets": (
        file_of({"a": entry(data_offsets=[0, 4, 8])}, b"\0" * 8),
        "expected 2 elements",
    ),
    "negative": (file_of({"a": entry(data_offsets=[-8, 0])}), "expected usize"),
    "truth as a number": (file_of({"a": entry(0, 4, shape=[True])}, b"\0" * 4), "expected usize"),
    "a fraction": (file_of({"a": entry(shape=[2.0])}, b"\0" * 8), "expected usize"),
    "no list": (file_of({"a": entry(shape={})}, b"\0" * 8), "expected a sequence"),
    "dimensions": (file_of({"a": entry(shape=[2] + [1] * 8)}, b"\0" * 8), "'a' has 9 dimensions"),
    "no dtype": (
        file_of({"a": {"shape": [], "data_offsets": [0, 0]}}),
        "'a' must have only dtype, shape and data_offsets",
    ),
    "one more field": (file_of({"a": entry(x=1)}, b"\0" * 8), "'a' must have only dtype"),
    "no object": (file_of({"a": 3}), "'a' must have only dtype, shape and data_offsets"),
    "metadata": (file_of({"__metadata__": {"a": 1}}), "not an object of strings"),
    "metadata, a list": (file_of({"__metadata__": []}), "not an object of strings"),
    "control characters": (file_of({"a\r\n\x1b": 3}), r"'a\r\n\x1b'"),
    "half of a character": (file_of(b'{"a\\ud800": {}}'), r"at the key 'a\ud800'"),
    "half of a character in metadata": (
        file_of(b'{"__metadata__": {"a": "\\udc00"}}'),
        "half of a character at the key 'a'",
    ),
    "a long name": (file_of({"a" * 10_000: 3}), "aaa…'"),
} | {
    dtype: (file_of({"a": entry(dtype=dtype)}, b"\0" * 8), f"'a' has the dtype '{dtype}'")
    for dtype in ("F64", "F8_E4M3", "F8_E5M2", "I8", "I64", "U8", "BOOL", "f32", "", "F4")
}


@pytest.mark.parametrize(("data", "message"), WRONG.values(), ids=WRONG)
def test_wrong_tensor_files_are_named(data: bytes, message: str) -> None:
    with pytest.raises(Invalid) as refusal:
        parse_safetensors(data)
    assert message in str(refusal.value)
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 500


def test_the_order_of_the_header_is_free() -> None:
    file = parse_safetensors(
        file_of({"b": entry(8, 16), "e": entry(8, 8, shape=[0]), "a": entry()}, b"12345678abcdefgh")
    )
    assert {name: bytes(one.data) for name, one in file.tensors.items()} == {
        "a": b"12345678",
        "b": b"abcdefgh",
        "e": b"",
    }
