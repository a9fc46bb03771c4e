"""A start after the first reads packed weights from a file; nothing that happens to the file changes an answer."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from millrace_shard.kernels.build import BuildError, load_operators
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.cpu.tile_blocks import TiledLayers
from millrace_shard.models.decoder import Decoder
from millrace_shard.weights.gguf.folder import prepare_gguf
from millrace_shard.weights.packed_weights import PackedWeights
from millrace_testing.models.gguf_files import TinyGguf
from millrace_testing.models.models import prompt_of, read_driver, save_tiny

BF16 = torch.bfloat16
LIMIT = 1 << 30
LONG_AGO = 1_600_000_000


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's file, old enough for its times to name its content."""
    monkeypatch.setattr("millrace_shard.weights.checkpoint_files.RACY_NS", -(10**12))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def operators() -> None:
    """Skips where there are none."""
    try:
        load_operators()
    except BuildError as error:
        pytest.skip(str(error))


def opened(folder: Path, *sources: Path, version: str = "1", limit: int = LIMIT) -> PackedWeights:
    return PackedWeights(folder, sources, [version], limit=limit)


def keep(folder: Path, source: Path, *, version: str = "1", limit: int = LIMIT) -> None:
    """Let a start pack weights and keep them."""
    packed = opened(folder, source, version=version, limit=limit)
    for name, weight in weights().items():
        packed.put(name, weight)
    wait(packed)


def wait(packed: PackedWeights) -> bool:
    """Keep what is new; whether there was anything."""
    thread = packed.keep()
    if thread is not None:
        thread.join()
    return thread is not None


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        str(size): torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
        for size in (1, 64, 1000, 9 << 20)
    }


def kept_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.packed"))


def is_whole(packed: PackedWeights) -> bool:
    """Whether all weights are there, bit for bit, and where operators can read them."""
    for name, expected in weights().items():
        weight = packed.get(name)
        if weight is None or not torch.equal(weight, expected) or weight.data_ptr() % 64:
            return False
    return True


def test_a_second_start_reads_what_the_first_has_packed(tmp_path: Path, source: Path) -> None:
    keep(tmp_path / "packed", source)
    assert is_whole(opened(tmp_path / "packed", source))
    assert not list((tmp_path / "packed").glob("*.part"))


def test_weights_that_are_read_may_lie_on_huge_pages(tmp_path: Path, source: Path) -> None:
    keep(tmp_path, source)
    weight = opened(tmp_path, source).get("1")
    assert weight is not None
    address = weight.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, rest = line.partition("-")
        end, modes = rest.split()[:2]
        if int(begin, 16) <= address < int(end, 16):
            assert modes == "rw-p", "shared memory has small pages"
            return
    pytest.fail("the weight is in no mapping")


@pytest.mark.parametrize("change", ["content", "version", "both files"])
def test_other_weights_are_not_taken(change: str, tmp_path: Path, source: Path) -> None:
    keep(tmp_path / "packed", source)
    sources, version = [source], "1"
    if change == "content":
        status = source.stat()
        source.write_bytes(b"WEIGHTS")
        os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif change == "version":
        version = "2"
    else:
        sources.append(source)
    assert not opened(tmp_path / "packed", *sources, version=version).is_kept


def test_a_moved_model_needs_no_second_file(tmp_path: Path, source: Path) -> None:
    folder, other = tmp_path / "packed", tmp_path / "other.gguf"
    keep(folder, source)
    other.write_bytes(source.read_bytes())
    keep(folder, other)
    assert len(kept_files(folder)) == 1
    assert is_whole(opened(folder, other))


@pytest.mark.parametrize("place", ["weight", "index", "end", "cut", "empty"])
def test_a_damaged_file_is_packed_again(
    place: str, tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "packed"
    keep(folder, source)
    (path,) = kept_files(folder)
    data = bytearray(path.read_bytes())
    at = {"weight": 5 << 20, "index": len(data) - 100, "end": len(data) - 1}
    if place in at:
        data[at[place]] ^= 1
    path.write_bytes({"cut": bytes(data[:-5000]), "empty": b""}.get(place, bytes(data)))
    assert not opened(folder, source).is_kept
    assert "damaged" in caplog.text
    keep(folder, source)
    assert is_whole(opened(folder, source))


def test_the_least_recently_used_file_goes_first(tmp_path: Path, source: Path) -> None:
    folder = tmp_path / "packed"
    for version in "123":
        keep(folder, source, version=version)
    for age, path in enumerate(kept_files(folder)):
        os.utime(path, (LONG_AGO + age, LONG_AGO + age))
    assert opened(folder, source, version="1").is_kept
    size = kept_files(folder)[0].stat().st_size
    keep(folder, source, version="4", limit=3 * size)
    versions = [v for v in "1234" if opened(folder, source, version=v).is_kept]
    assert len(versions) == 3
    assert {"1", "4"} <= set(versions)
    keep(folder, source, version="5", limit=size // 2)
    assert not opened(folder, source, version="5").is_kept


def test_another_start_that_writes_the_file_is_left_alone(tmp_path: Path, source: Path) -> None:
    folder = tmp_path / "packed"
    keep(folder, source)
    (path,) = kept_files(folder)
    part = path.with_suffix(".part")
    path.rename(part)
    with part.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        keep(folder, source)
        assert not path.exists()
        assert part.stat().st_size > sum(map(len, weights().values()))
    keep(folder, source)
    assert path.exists()
    assert not part.exists()


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Files cannot become longer than 4 MiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(tmp_path / "packed", source)
    assert list((tmp_path / "packed").iterdir()) == []
    assert "not kept" in caplog.text


def test_a_folder_that_cannot_be_made_costs_a_warning(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "packed").write_text("a file")
    keep(tmp_path / "packed", source)
    assert "not kept" in caplog.text


def test_a_mask_of_modes_that_the_process_sets_meanwhile_leaves_the_folder_usable(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedWeights, "_keep", lambda *_: None)
    keep(tmp_path / "packed", source)
    assert (tmp_path / "packed").stat().st_mode & 0o777 == 0o700


def checkpoint(kind: str, folder: Path) -> Path:
    if kind == "gguf":
        path = TinyGguf("llama", "Q5_K").write(folder / "m.gguf")
        return prepare_gguf(path, folder / "cache", tokenizer=None)
    save_tiny(folder / kind, kind)
    return folder / kind


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize(
    ("kind", "quantize"), [("gguf", None), ("phi3", "int4"), ("qwen3_moe", "int4")]
)
def test_a_model_of_kept_weights_has_the_same_bits(
    kind: str, quantize: str | None, integer: bool, tmp_path: Path, source: Path
) -> None:
    folder = checkpoint(kind, tmp_path)
    starts = []
    for start in range(2):
        packed = opened(tmp_path / "packed", source)
        assert packed.is_kept == (start == 1)
        kernels = CpuKernels(deterministic=True, integer=integer)
        driver = read_driver(folder, kernels, dtype=BF16, quantize=quantize, packed=packed)
        # The second start packs nothing.
        assert wait(packed) == (start == 0)
        starts.append(driver.generate([prompt_of(40)], 3)[0].logits)
    for first, second in zip(*starts, strict=True):
        assert torch.equal(first, second)


MIXED = {
    "q_proj": "Q5_0",
    "k_proj": "Q5_K",
    "v_proj": "Q8_0",
    "gate_proj": "Q4_K",
    "up_proj": "Q6_K",
}


@pytest.mark.usefixtures("operators")
def test_mixed_block_types_of_a_fused_linear_stay_codes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = TinyGguf("qwen2", "Q5_1", kinds=MIXED)
    folder = prepare_gguf(tiny.write(tmp_path / "m.gguf"), tmp_path / "cache", tokenizer=None)
    kernels = CpuKernels(deterministic=True)
    driver = read_driver(folder, kernels, dtype=BF16)
    assert isinstance(driver.model, Decoder)
    layers = driver.model.run_layers
    assert isinstance(layers, TiledLayers)
    matrices = [weight for weight in layers._weights if weight.ndim == 1 and len(weight) > 2**15]
    assert [weight.dtype for weight in matrices] == [torch.uint8] * 8
    ours, theirs = (
        each.generate([prompt_of(40)], 1)[0].logits[0].float()
        for each in (driver, read_driver(folder))
    )
    assert float((ours - theirs).norm() / theirs.norm()) < 0.02
    assert not caplog.records


@pytest.mark.usefixtures("operators")
def test_one_warning_names_the_layers_whose_parts_stay_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = TinyGguf("llama", "Q4_0", kinds={"v_proj": "F16", "up_proj": "F32"})
    folder = prepare_gguf(tiny.write(tmp_path / "m.gguf"), tmp_path / "cache", tokenizer=None)
    read_driver(folder, CpuKernels(deterministic=True), dtype=BF16)
    (warning,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert warning == (
        "computed apart: the parts of a fused linear have no common form: model.layers.{0,1}.self_attn.q_proj"
        " model.layers.{0,1}.self_attn.k_proj model.layers.{0,1}.self_attn.v_proj,"
        " model.layers.{0,1}.mlp.gate_proj model.layers.{0,1}.mlp.up_proj"
    )
