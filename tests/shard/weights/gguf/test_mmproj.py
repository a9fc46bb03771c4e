"""Mmproj files: tensors in all formats, names of older converters, and what is refused before weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as BlockType
from tokenizers import Tokenizer

from millrace_router.images.families import geometry_of
from millrace_shard.errors import ModelError
from millrace_shard.weights.download import HubAccess
from millrace_shard.weights.gguf.encoders import UnsupportedProjector
from millrace_shard.weights.gguf.files import MmprojFiles
from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_shard.weights.gguf.tokenizer import TokenKind
from millrace_shard.weights.hub import HubSettings, resolve
from millrace_testing.models.gguf_files import CONTROL, read_config
from millrace_testing.models.mmproj_files import TinyPair
from millrace_testing.models.vision_models import GRIDS

PATCHES = "model.vision_model.embeddings.patch_embedding.weight"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """Of widths that hold blocks of 32 values."""
    vision = {"hidden_size": 96, "intermediate_size": 64}
    return TinyPair("idefics3", tmp_path_factory.mktemp("hf"), vision=vision)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_blocks_are_decoded_as_by_ggml(kind: str, pair: TinyPair, tmp_path: Path) -> None:
    pair.kind = kind
    pair.write_encoder(tmp_path / "mmproj.gguf")
    files = MmprojFiles(tmp_path / "mmproj.gguf")
    stored = {
        "model.vision_model.encoder.layers.1.mlp.fc1.weight": "v.blk.1.ffn_up.weight",
        "model.connector.modality_projection.proj.weight": "mm.model.fc.weight",
    }
    for name, in_file in stored.items():
        data = pair.tensors[in_file]
        blocks = gguf.quants.quantize(data, BlockType[kind])
        expected = torch.from_numpy(gguf.quants.dequantize(blocks, BlockType[kind]))
        assert files.shape(name) == data.shape
        for span in ((0, len(data)), (3, 11)):
            rows = files.read(name, dim=0, span=span)
            assert torch.equal(rows.float(), expected[slice(*span)])
        columns = files.read(name, dim=1, span=(1, 5))
        assert torch.equal(columns.float(), expected[:, 1:5])
    patches = files.read(PATCHES, dim=0, span=(2, 7))
    assert np.array_equal(patches.numpy(), pair.tensors["v.patch_embd.weight"][2:7])
    files.close()


def test_names_of_older_converters_are_the_same_tensors(pair: TinyPair, tmp_path: Path) -> None:
    tensors, pair.kind = pair.tensors, "F32"
    others = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    pair.tensors = {
        next((name.replace(a, b) for a, b in others.items() if a in name), name): data
        for name, data in tensors.items()
    }
    pair.write_encoder(tmp_path / "older.gguf")
    pair.tensors = tensors
    pair.write_encoder(tmp_path / "newer.gguf")
    older, newer = (MmprojFiles(tmp_path / f"{name}.gguf") for name in ("older", "newer"))
    for kind in ("weight", "bias"):
        for module in ("mlp.fc1", "mlp.fc2"):
            name = f"model.vision_model.encoder.layers.0.{module}.{kind}"
            span = (0, newer.shape(name)[0])
            assert torch.equal(*(each.read(name, dim=0, span=span) for each in (older, newer)))
    for files in (older, newer):
        files.close()


def test_a_token_for_images_that_the_file_leaves_out_takes_the_place_of_an_unused_one(
    tmp_path: Path,
) -> None:
    gemma = TinyPair("gemma3", tmp_path / "hf")
    tokens = gemma.text.metadata["tokenizer.ggml.tokens"]
    others = ["<unused0>", "<start_of_image>", *tokens[5:-1], "<unused1>"]
    gemma.text.metadata["tokenizer.ggml.tokens"] = [*tokens[:3], *others]
    text, encoder = gemma.write(tmp_path / "m.gguf")
    folder = prepare_gguf(text, tmp_path / "cache", tokenizer=None, mmproj=encoder)
    assert read_config(folder)["image_token_id"] == len(tokens) - 1
    # The file has it as a normal token.
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert [each["special"] for each in added if each["content"] == "<start_of_image>"] == [True]
    gemma.text.metadata["tokenizer.ggml.tokens"] = [*tokens[:-1], "word"]
    text, encoder = gemma.write(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"needs the token <image_soft_token>, which .*other.gguf"):
        prepare_gguf(text, tmp_path / "cache", tokenizer=None, mmproj=encoder)


@pytest.mark.parametrize(
    ("spare", "kind"), [("<|reserved_special_token_7|>", CONTROL), ("<0x00>", TokenKind.BYTE)]
)
def test_a_token_for_images_of_llava_takes_the_place_of_one_that_no_text_has(
    spare: str, kind: int, tmp_path: Path
) -> None:
    pair = TinyPair("llava", tmp_path / "hf")
    tokens, kinds = (
        pair.text.metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type")
    )
    tokens[-1], kinds[-1] = spare, int(kind)
    text, encoder = pair.write(tmp_path / "m.gguf")
    folder = prepare_gguf(text, tmp_path / "cache", tokenizer=None, mmproj=encoder)
    assert read_config(folder)["image_token_id"] == len(tokens) - 1
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("a<image>", add_special_tokens=False).ids[1:] == [len(tokens) - 1]


def test_sizes_of_tiles_and_grids_are_in_the_processors_file(tmp_path: Path) -> None:
    for family, expected in (
        ("internvl", {"size": {"height": 24, "width": 24}, "min_patches": 1, "max_patches": 6}),
        ("llava", {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}),
        ("llava_next", {"image_grid_pinpoints": GRIDS}),
    ):
        text, encoder = TinyPair(family, tmp_path / family).write(tmp_path / f"{family}.gguf")
        folder = prepare_gguf(text, tmp_path / "cache", tokenizer=None, mmproj=encoder)
        processor = json.loads((folder / "preprocessor_config.json").read_text())
        assert expected.items() <= processor.items()
        assert (
            geometry_of(read_config(folder)["model_type"], processor).most_tiles
            == {
                "internvl": 7,
                "llava": 1,
                "llava_next": 5,
            }[family]
        )


def without(name: str) -> Callable[[TinyPair], None]:
    return lambda pair: pair.tensors.__delitem__(name)


def key(name: str, value: object) -> Callable[[TinyPair], None]:
    return lambda pair: pair.metadata.update({name: value})


def rows(name: str, count: int) -> Callable[[TinyPair], None]:
    return lambda pair: pair.tensors.update({name: pair.tensors[name][:count]})


def extra(pair: TinyPair) -> None:
    pair.tensors["v.blk.0.ls1.weight"] = pair.tensors["v.blk.0.ln1.weight"]


WRONG: dict[str, tuple[Callable[[TinyPair], None], str]] = {
    "projector": (
        key("clip.projector_type", "resampler"),
        r"projector_type='resampler'; these are supported: gemma3, idefics3, qwen2vl_merger, qwen2.5",
    ),
    "text": (
        key("clip.projector_type", "gemma3"),
        r"tensor mm.input_projection.weight is missing from mmproj-m.gguf",
    ),
    "no encoder": (
        key("general.architecture", "llama"),
        "architecture 'llama', and an encoder has",
    ),
    "width": (
        rows("mm.model.fc.weight", 48),
        r"makes features of 48 numbers, and m.gguf has hidden states of 64",
    ),
    "missing": (without("v.blk.1.attn_q.bias"), "tensor v.blk.1.attn_q.bias is missing"),
    "shape": (
        rows("v.position_embd.weight", 9),
        r"position_embd.weight .*\[9, 96\], .* \[36, 96\]",
    ),
    "extra": (extra, "has tensor v.blk.0.ls1.weight, which is not supported"),
    "key": (key("clip.vision.feature_layer", 3), "clip.vision.feature_layer=3 is not supported"),
    "mean": (key("clip.vision.image_mean", [0.5]), "image_mean must be 3 numbers"),
    "layers": (key("clip.vision.block_count", 1 << 30), "announces 1073741824 layers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_does_not_fit_ends_the_start_with_one_line(
    name: str, pair: TinyPair, tmp_path: Path
) -> None:
    access = HubAccess(endpoint="http://127.0.0.1:9", token=None, cache=tmp_path / "hub")
    settings = HubSettings(access, offline=True, side_root=tmp_path / "side")
    change, message = WRONG[name]
    tensors, metadata = dict(pair.tensors), dict(pair.metadata)
    change(pair)
    pair.kind = "F32"
    text, encoder = pair.write(tmp_path / "m.gguf")
    pair.tensors, pair.metadata = tensors, metadata
    remedy = "; name another file with --mmproj, or serve only text with --mmproj off$"
    with pytest.raises(ModelError, match=f"{message}.*{remedy}"):
        resolve(str(text), revision=None, settings=settings, mmproj=str(encoder))
    assert resolve(str(text), revision=None, settings=settings, mmproj="off").is_dir()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("feature_layer", [1], r"feature_layer=.* is not supported"),
        ("image_grid_pinpoints", [24, 48, 24], "image_grid_pinpoints must be pairs"),
        ("image_grid_pinpoints", None, "image_grid_pinpoints must be pairs"),
    ],
)
def test_settings_of_llava_that_are_not_computed_are_refused(
    key: str, value: object, message: str, tmp_path: Path
) -> None:
    pair = TinyPair("llava_next", tmp_path / "hf", metadata={f"clip.vision.{key}": value})
    text, encoder = pair.write(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=message):
        prepare_gguf(text, tmp_path / "cache", tokenizer=None, mmproj=encoder)


def test_encoders_of_tiles_without_a_class_token_or_with_other_functions_are_refused(
    tmp_path: Path,
) -> None:
    siglip, silu = (
        TinyPair("llava", tmp_path / "llava"),
        TinyPair("internvl", tmp_path / "internvl", metadata={"clip.use_gelu": False}),
    )
    del siglip.tensors["v.class_embd"]
    reasons = "without a class token", "with quick_gelu, not with gelu"
    for pair, reason in zip((siglip, silu), reasons, strict=True):
        text, encoder = pair.write(tmp_path / f"{pair.family}.gguf")
        with pytest.raises(UnsupportedProjector, match=reason):
            prepare_gguf(text, tmp_path / "cache", tokenizer=None, mmproj=encoder)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("resampler", "'resampler'; these are supported"),
        ("qwen3vl_merger", "reads images for qwen"),
    ],
)
def test_an_encoder_that_was_only_found_and_is_not_known_leaves_a_model_of_text(
    kind: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    access = HubAccess(endpoint="http://127.0.0.1:9", token=None, cache=tmp_path / "hub")
    settings = HubSettings(access, offline=True, side_root=tmp_path / "side")
    own = TinyPair("idefics3", tmp_path / "hf", metadata={"clip.projector_type": "resampler"})
    text, encoder = own.write(tmp_path / "m.gguf")
    if kind != "resampler":
        TinyPair("qwen3_vl", tmp_path / "other").write_encoder(encoder)
    folder = resolve(str(text), revision=None, settings=settings)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert [each for each in caplog.messages if reason in each and "only text is served" in each]


def test_an_encoder_of_another_model_is_named(pair: TinyPair, tmp_path: Path) -> None:
    qwen = TinyPair("qwen2_vl", tmp_path / "qwen")
    text, encoder = qwen.write(tmp_path / "m.gguf")[0], tmp_path / "other.gguf"
    pair.write_encoder(encoder)
    message = (
        r"other.gguf \(projector_type idefics3\) is for text models of llama, and m.gguf has q"
    )
    with pytest.raises(ModelError, match=message):
        prepare_gguf(text, tmp_path / "cache", tokenizer=None, mmproj=encoder)
    other = TinyPair("qwen3_vl", tmp_path / "deep")
    other.write_encoder(tmp_path / "deep.gguf")
    text = TinyPair("qwen3_5", tmp_path / "hybrid").text.write(tmp_path / "hybrid.gguf")
    with pytest.raises(ModelError, match=r"deep.gguf .* for the first layers .* has qwen35; name"):
        prepare_gguf(text, tmp_path / "cache", tokenizer=None, mmproj=tmp_path / "deep.gguf")
    assert not list((tmp_path / "cache").glob("*"))
