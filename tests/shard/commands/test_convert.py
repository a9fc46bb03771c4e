"""Pickled weights to safetensors: every tensor under its name, bit for bit, and no code run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from millrace_shard.commands.convert import ConversionError, convert, main


class Bomb:
    """Unpickling it would write the file `exploded`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_tied_and_strided_tensors_keep_their_values_and_types(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(8, 4, generator=generator).bfloat16()
    whole = torch.randn(6, 6, generator=generator)
    tensors = {"embed": embedding, "head": embedding, "slice": whole[:, 1:3], "transposed": whole.T}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert convert(tmp_path, tmp_path) == [tmp_path / "model.safetensors"]
    result = load_file(tmp_path / "model.safetensors")
    assert result.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert result[name].dtype == tensor.dtype
        assert torch.equal(result[name], tensor)


def test_many_files_are_spread_anew_with_an_index(tmp_path: Path) -> None:
    tensors = {f"layer.{i}": torch.full((100,), float(i)) for i in range(7)}
    names = list(tensors)
    for part, chosen in (("1", names[:5]), ("2", names[5:])):
        torch.save({name: tensors[name] for name in chosen}, tmp_path / f"pytorch_model-{part}.bin")
    torch.save({"epoch": 3}, tmp_path / "training_args.bin")
    output = tmp_path / "out"
    files = convert(tmp_path, output, max_file_bytes=1000)
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)
    ]
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2800
    assert set(index["weight_map"]) == set(tensors)
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(output / file)[name], tensors[name])
    assert {path.name for path in output.iterdir()} == {file.name for file in files} | {
        "model.safetensors.index.json"
    }


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    torch.save({"weight": Bomb(tmp_path / "exploded")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConversionError, match="cannot be read as plain tensors"):
        convert(tmp_path, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"pytorch_model.bin"}


def test_failure_in_a_later_file_leaves_nothing_behind(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(100)}, tmp_path / "pytorch_model-1.bin")
    (tmp_path / "pytorch_model-2.bin").write_bytes(b"broken")
    with pytest.raises(ConversionError):
        convert(tmp_path, tmp_path, max_file_bytes=10)
    assert not list(tmp_path.glob("*safetensors*"))
    assert not list(tmp_path.glob(".conv*"))


def test_a_missing_part_of_the_index_is_refused(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "pytorch_model-1.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ConversionError, match=r"pytorch_model-1\.bin, which"):
        convert(tmp_path, tmp_path)


def test_existing_safetensors_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConversionError, match="already has"):
        convert(tmp_path, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"


def test_command_converts_or_names_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 1
    assert "has no pytorch_model*.bin" in capsys.readouterr().err
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert main([str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/out/model.safetensors\n"
