"""Masks written one after the other and by threads are those that each matcher gives by itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

from millrace_shard.structured_output import mask_computer
from millrace_shard.structured_output.mask_computer import (
    ALONE_SECONDS,
    NUM_SHARED,
    MaskFiller,
    MaskLines,
)
from millrace_testing.engines.grammars import Words, allowed, mask_of, regex

WORDS = Words([bytes([byte]) for byte in range(ord("a"), ord("z") + 1)], size=75)
NUM_ROWS = 9
WIDTH = 3
UNTOUCHED = 0x5A5A5A5A


def seconds(step: float) -> Iterator[float]:
    """A clock that goes on by so much whenever it is read."""
    return (number * step for number in count())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, NUM_SHARED, NUM_ROWS])
@pytest.mark.parametrize("step", [0.0, ALONE_SECONDS / 3, ALONE_SECONDS], ids=str)
def test_masks_do_not_depend_on_threads_and_stay_in_their_lines(
    *, overlap: bool, num_rows: int, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = seconds(step)
    monkeypatch.setattr(
        "millrace_shard.structured_output.mask_computer.perf_counter", lambda: next(clock)
    )
    matchers = [WORDS.matcher(regex(f"[{chr(ord('a') + row)}-z]")) for row in range(num_rows)]
    expected = [mask_of(matcher) for matcher in matchers]
    lines = [2 * NUM_ROWS - 2 * row for row in range(num_rows)]
    masks = MaskLines(2 * NUM_ROWS + 1, WIDTH)
    bits = masks.bits
    bits[:] = UNTOUCHED
    filler = MaskFiller(overlap=overlap)
    filler.fill([(m.inner, line) for m, line in zip(matchers, lines, strict=True)], masks)
    assert [sorted(allowed(bits[line])) for line in lines] == expected
    others = np.setdiff1d(np.arange(len(bits)), lines)
    assert (bits[others] == UNTOUCHED).all()


def test_slow_masks_go_to_threads_while_there_are_enough_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_threads: list[int] = []
    monkeypatch.setattr(
        mask_computer,
        "fill_next_token_bitmask_par",
        lambda _, asked, __: by_threads.append(len(asked)),
    )
    matcher = WORDS.matcher(regex("[a-z]*"))
    masks = MaskLines(NUM_ROWS, WIDTH)
    asked = [(matcher.inner, line) for line in range(NUM_ROWS)]
    for step, num_rows, expected in (
        (0.0, NUM_ROWS, []),
        (ALONE_SECONDS / 2, NUM_ROWS, [NUM_ROWS - 1]),
        (ALONE_SECONDS / 2, NUM_SHARED, []),
    ):
        clock = seconds(step)
        monkeypatch.setattr(
            "millrace_shard.structured_output.mask_computer.perf_counter",
            lambda clock=clock: next(clock),
        )
        MaskFiller(overlap=False).fill(asked[:num_rows], masks)
        assert by_threads == expected
        by_threads.clear()
