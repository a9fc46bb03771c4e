from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.elementwise import GRAINS, LANES, elementwise, padded_length

COUNTS = (1, 63, 64, 65, 200, 2047, 2049, 16385, 32767, 32769, 65537, 100003)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "erf": torch.erf,
    "mish": F.mish,
    "softplus": F.softplus,
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_element_has_the_same_bits_wherever_it_lies(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    numbers = torch.randn(max(COUNTS), generator=torch.Generator().manual_seed(1)).to(dtype) * 3
    torch.set_num_threads(1)
    expected = elementwise(function, numbers)
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        for count in COUNTS:
            for start in (0, len(numbers) - count):
                part = numbers[start : start + count]
                assert torch.equal(elementwise(function, part), expected[start : start + count])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_bfloat16_number_has_the_same_bits_among_few_and_many(name: str) -> None:
    """The test has all numbers, since rounding to so few bits hides most differences."""
    function = FUNCTIONS[name]
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    many = elementwise(function, every)
    few = torch.cat([elementwise(function, part) for part in torch.split(every, 63)])
    assert torch.equal(few.view(torch.int16), many.view(torch.int16))


def test_any_shape_and_strides_come_back_in_shape() -> None:
    x = torch.randn(3, 70, 50)[:, :, 7:40]
    out = elementwise(torch.neg, x)
    assert out.shape == x.shape
    assert torch.equal(out, -x)
    assert elementwise(torch.neg, x[:, :0]).shape == (3, 0, 33)


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 48, 64])
def test_every_share_of_a_padded_length_is_whole(threads: int) -> None:
    for count in (0, 1, 64, 3000, 40_000, 100_003, 1_000_001, 5_000_003):
        length = padded_length(count, threads)
        assert count <= length <= count + LANES * threads * threads
        for grain in (*GRAINS, 1):
            parts = min(threads, -(-length // grain)) or 1
            assert all(begin % LANES == 0 for begin in range(0, length, -(-length // parts) or 1))
        assert length % LANES == 0
