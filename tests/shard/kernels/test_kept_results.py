"""Checks and measurements of an earlier start are not repeated, unless anything that they depend on has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from millrace_shard.kernels import choose, kept_results
from millrace_shard.kernels.build import BuildError, load_operators
from millrace_shard.kernels.choose import choose_kernels
from millrace_shard.kernels.cpu import packed_weight
from millrace_shard.kernels.cpu.packed_weight import packed_codes
from millrace_shard.kernels.kept_results import ENDING, KeptResults
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_testing.quantized.code_formats import random_codes

VERSIONS = ("library", "torch")


def results_in(folder: Path, *versions: str) -> KeptResults:
    return KeptResults(folder, versions or VERSIONS)


def test_a_result_is_read_by_later_starts_of_the_same_versions(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    first = results_in(folder)
    assert first.get("bytes") is None
    first.put("bytes", 7)
    assert results_in(folder).get("bytes") == 7
    assert results_in(folder).get("seconds") is None
    assert results_in(folder, "library", "newer torch").get("bytes") is None
    assert results_in(folder, "librarytorch").get("bytes") is None
    assert folder.stat().st_mode & 0o077 == 0


def test_a_check_that_passed_is_not_repeated_and_one_that_failed_is(tmp_path: Path) -> None:
    answers = [False, True]

    def check() -> bool:
        return answers.pop(0)

    assert not results_in(tmp_path).passed("kernels", check)
    assert not list(tmp_path.iterdir())
    assert results_in(tmp_path).passed("kernels", check)
    assert results_in(tmp_path).passed("kernels", check)
    assert answers == []


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def fill_with_noise(path: Path) -> None:
    path.write_bytes(b"\xff\n\xfe")


def replace_by_another_result(path: Path) -> None:
    results_in(path.parent / "other").put("bytes", 8)
    (other,) = (path.parent / "other").iterdir()
    other.replace(path)


@pytest.mark.parametrize("damage", [tear, empty, fill_with_noise, replace_by_another_result])
def test_a_damaged_file_costs_one_line_and_is_measured_again(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    results = results_in(tmp_path)
    results.put("kernels", result=True)
    (path,) = tmp_path.glob(f"*{ENDING}")
    damage(path)
    assert results.get("kernels") is None
    assert ["damaged" in record.message for record in caplog.records] == [True]
    results.put("kernels", result=True)
    assert results.get("kernels") is True


@pytest.mark.parametrize("of_folder", [False, True])
def test_what_others_can_write_is_not_trusted(
    of_folder: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    results = results_in(tmp_path)
    results.put("kernels", result=True)
    (path,) = tmp_path.glob(f"*{ENDING}")
    (tmp_path if of_folder else path).chmod(0o777)
    assert results.get("kernels") is None
    assert results.get("kernels") is None
    assert ["other users" in record.message for record in caplog.records] == [True]


def test_a_folder_that_cannot_be_made_costs_one_line_and_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    results = results_in(tmp_path / "file" / "results")
    assert results.passed("kernels", lambda: True)
    results.put("bytes", 7)
    assert len(caplog.records) <= 2
    assert not KeptResults(None, VERSIONS).passed("kernels", lambda: False)


def test_the_folder_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_results, "MOST_FILES", 3)
    results = results_in(tmp_path)
    for number in range(5):
        results.put(f"{number}", number)
    assert len(list(tmp_path.iterdir())) == 3
    assert results.get("4") == 4


class Counter:
    """Counts the calls of a function that it replaces."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.calls = 0
        self._function = getattr(owner, name)
        patch.setattr(owner, name, self)

    def __call__(self, *arguments: object, **names: object) -> object:
        self.calls += 1
        return self._function(*arguments, **names)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a machine whose operators load."""
    try:
        load_operators()
    except BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(kept_results, "cache_folder", lambda kind: tmp_path / kind)
    return tmp_path / "results"


def start() -> str:
    shapes = [LayerShape.small(64)]
    return choose_kernels(
        torch.device("cpu"), torch.bfloat16, deterministic=True, shapes=shapes, adapters=True
    ).name


def test_a_second_start_repeats_no_check_and_a_changed_library_repeats_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Counter(monkeypatch, choose, "largest_difference")
    adapters = Counter(monkeypatch, choose, "adapter_difference")
    assert [start(), kernels.calls, adapters.calls] == ["cpu", 1, 1]
    assert [start(), kernels.calls, adapters.calls] == ["cpu", 1, 1]
    with monkeypatch.context() as patch:
        patch.setattr(kept_results, "load_operators", lambda: "cpu_ops-newer.so")
        assert [start(), kernels.calls, adapters.calls] == ["cpu", 2, 2]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 7)
        assert [start(), kernels.calls, adapters.calls] == ["cpu", 3, 3]
    for file in folder.iterdir():
        file.unlink()
    assert [start(), kernels.calls, adapters.calls] == ["cpu", 4, 4]


def test_a_format_of_codes_is_compared_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Counter(monkeypatch, packed_weight, "_is_like_plain")
    for _ in range(2):
        packed_weight._agrees.cache_clear()
        assert packed_codes([random_codes("int4", 48, 128, 32)], integer=False) is not None
    assert (checks.calls, len(list(folder.iterdir()))) == (1, 1)


def test_kernels_that_differ_are_compared_at_each_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(choose, "largest_difference", lambda *_, **__: 0.5)
        assert start() == "plain"
        assert not folder.exists()
        load_operators()
        assert start() == "plain"
    load_operators()
    assert start() == "cpu"
