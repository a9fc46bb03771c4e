"""The gain by activations in int8: measured with a clock that stands still but for the test, and kept in a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.cpu import activation_gain
from millrace_shard.kernels.cpu.activation_gain import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    GainUnknown,
    kept_gain,
    overall,
    ratio,
)
from millrace_shard.kernels.layer_shape import CodedLinears
from millrace_shard.kernels.quantized import UNIT_INPUTS, CodeFormat
from millrace_shard.kernels.toolchain import BuildError

INT4 = CodeFormat(values=tuple(range(-8, 8)), group_size=64)
NF4 = CodeFormat(values=tuple(code / 15 for code in range(16)), group_size=64)
LINEARS = (CodedLinears(INT4, 128, 192), CodedLinears(NF4, 128, 64))


class Clock:
    """Seconds that pass only in calls which say so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.readings = 0

    def __call__(self) -> float:
        self.readings += 1
        return self.now

    def call(self, *seconds: float) -> Callable[[], None]:
        """A call that takes so long at each turn, the last of them from then on."""
        left = list(seconds)

        def run() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_the_gain_is_the_ratio_of_lower_quartiles_without_the_first_round() -> None:
    clock = Clock()
    slow = clock.call(1.0, 1.0, 90.0, 80.0, 3.0, 70.0, 3.0)
    fast = clock.call(1.0, 70.0, 2.0, 2.0, 1.0, 60.0, 2.0)
    assert ratio(slow, fast, clock=clock, seconds=0.0) == 1.5


@pytest.mark.parametrize(
    ("decodes", "prompt", "gain"),
    [
        ((1.0, 1.0, 8.0), 1.1, 2.0),
        ((1.0, 1.0, 1.1), 1.4, 1.4),
        ((0.92, 0.92, 0.92 * 8), 0.9, 1.84),
        ((0.88, 4.0, 4.0), 4.0, 0.88),
        ((4.0, 4.0, 4.0), 0.88, 0.88),
    ],
)
def test_a_gain_in_prompts_or_decodes_counts_unless_a_step_becomes_slower_by_a_tenth(
    decodes: tuple[float, ...], prompt: float, gain: float
) -> None:
    assert overall(decodes, prompt) == pytest.approx(gain)


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, LEAST_ROUNDS), (1e9, MOST_ROUNDS)])
def test_rounds_end_with_the_time_but_not_before_the_least_number(
    seconds: float, rounds: int
) -> None:
    clock, order = Clock(), list[str]()
    calls = {name: clock.call(1.0) for name in ("slow", "fast")}

    def noted(name: str) -> Callable[[], None]:
        def run() -> None:
            order.append(name)
            calls[name]()

        return run

    ratio(noted("slow"), noted("fast"), clock=clock, seconds=seconds)
    firsts = order[2::2]
    assert len(firsts) == rounds
    # Each is first in turn.
    assert all(one != other for one, other in pairwise(firsts))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept gains, and a smaller model to measure."""
    load_operators()
    monkeypatch.setattr(activation_gain, "cache_folder", lambda kind: tmp_path / kind)
    monkeypatch.setattr(activation_gain, "SAMPLE_CODES", 1 << 16)
    return tmp_path / "gains"


class Ticks(Clock):
    """A clock that goes on by one second with each reading: whatever is measured takes as long."""

    def __call__(self) -> float:
        self.now += 1.0
        return super().__call__()


def unread() -> float:
    raise AssertionError("the gain is measured again")


def test_a_later_start_reads_the_gain_and_measures_nothing(folder: Path) -> None:
    assert kept_gain(LINEARS, clock=Ticks()) == 1.0
    (path,) = folder.glob("*.json")
    path.write_text(json.dumps({"gain": 1.31}))
    assert kept_gain(LINEARS, clock=unread) == 1.31


def test_starts_at_the_same_time_agree_on_one_measurement(folder: Path) -> None:
    clocks = [Ticks() for _ in range(4)]
    with ThreadPoolExecutor(len(clocks)) as pool:
        gains = list(pool.map(lambda clock: kept_gain(LINEARS, clock=clock), clocks))
    assert gains == [1.0] * len(clocks)
    assert sum(clock.readings > 0 for clock in clocks) == 1
    assert len(list(folder.glob("*.json"))) == 1


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"gain": "fast"}', b'{"gain": NaN}', b"{}", b"\xff"]
)
def test_a_damaged_file_is_measured_again(folder: Path, content: bytes) -> None:
    kept_gain(LINEARS, clock=Ticks())
    (path,) = folder.glob("*.json")
    path.write_bytes(content)
    assert kept_gain(LINEARS, clock=Ticks()) == 1.0
    assert json.loads(path.read_bytes())["gain"] == 1.0


def test_shapes_threads_and_kernels_have_gains_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [
        LINEARS,
        (CodedLinears(INT4, 128, 256), LINEARS[1]),
        (CodedLinears(INT4, 256, 192), LINEARS[1]),
        LINEARS[:1],
    ]
    for linears in others:
        kept_gain(linears, clock=Ticks())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    kept_gain(LINEARS, clock=Ticks())
    monkeypatch.setattr(activation_gain, "load_operators", lambda: "another library")
    kept_gain(LINEARS, clock=Ticks())
    assert len(list(folder.glob("*.json"))) == len(others) + 2


def test_where_no_file_can_be_kept_nothing_is_measured(folder: Path) -> None:
    folder.write_text("a file in the folder's place")
    with pytest.raises(GainUnknown, match="cannot be kept"):
        kept_gain(LINEARS, clock=unread)


def test_a_folder_that_others_can_write_decides_nothing(folder: Path) -> None:
    kept_gain(LINEARS, clock=Ticks())
    folder.chmod(0o777)
    with pytest.raises(GainUnknown, match="other users") as error:
        kept_gain(LINEARS, clock=unread)
    assert isinstance(error.value.__cause__, BuildError)


def test_weights_that_stand_for_no_integers_have_no_gain(folder: Path) -> None:
    with pytest.raises(GainUnknown, match="no weights of the model"):
        kept_gain(LINEARS[1:], clock=Ticks())
    with pytest.raises(GainUnknown, match="no weights of the model"):
        kept_gain((), clock=Ticks())
    assert not list(folder.glob("*.json"))


@pytest.mark.parametrize("has_units", [False, True])
def test_weights_are_measured_in_the_layout_of_the_files(has_units: bool) -> None:
    """K-quants count their scales in units, and have a kernel of their own."""
    form = CodeFormat(values=tuple(range(16)), group_size=32, has_offsets=True, has_units=has_units)
    weight = form.random(64, 640, torch.device("cpu"))
    assert CodeFormat.of(weight) == form
    assert weight.offsets is not None
    assert float(weight.dequantized().std()) == pytest.approx(640**-0.5, rel=0.5)
    if weight.units is not None:
        group = torch.arange(0, 640, 32) // UNIT_INPUTS
        for part, units in zip((weight.scales, weight.offsets), astuple(weight.units), strict=True):
            assert torch.equal(units, units.half().float())
            counts = part / units[:, group]
            assert torch.equal(counts, counts.round())
            assert float(counts.abs().max()) < 64
        assert not torch.equal(weight.units.scales[:, :1], weight.units.scales[:, 1:2])
