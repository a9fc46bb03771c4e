"""The tables of visible devices and of shards."""

from __future__ import annotations

import pytest

from millrace_launcher.config import HostVariables
from millrace_launcher.errors import ArgumentValidation, LaunchError, NotEnoughCUDADevices
from millrace_launcher.host.devices import shard_count, visible_devices


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "0,1"}, 1),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 5),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, 5),
        ({"ZE_AFFINITY_MASK": "0,1"}, 2),
    ],
)
def test_visible_devices(environ: dict[str, str], expected: int | None) -> None:
    variables = HostVariables.model_construct(None, **{k.lower(): v for k, v in environ.items()})
    assert visible_devices(variables, query=lambda _: ["gpu"] * 5) == expected


@pytest.mark.parametrize(
    ("sharded", "num_shard", "visible", "expected"),
    [
        (True, None, 4, 4),
        (True, 3, 1, 3),
        (False, None, 8, 1),
        (False, 5, 8, 5),
        (None, None, 6, 6),
        (None, None, None, 1),
        (None, None, 0, 1),
        (None, 2, None, 2),
    ],
)
def test_shard_count(
    sharded: bool | None, num_shard: int | None, visible: int | None, expected: int
) -> None:
    assert shard_count(sharded=sharded, num_shard=num_shard, visible=visible) == expected


@pytest.mark.parametrize(
    ("sharded", "num_shard", "visible", "error", "message"),
    [
        (True, None, None, NotEnoughCUDADevices, "`sharded` is true but only found 0 CUDA devices"),
        (True, None, 1, NotEnoughCUDADevices, "`sharded` is true but only found 1 CUDA devices"),
        (True, 1, 4, ArgumentValidation, "`sharded` is true but `num_shard` <= 1"),
        (None, 0, 4, ArgumentValidation, "`num_shard` cannot be < 1"),
        (False, 0, 4, ArgumentValidation, "`num_shard` cannot be < 1"),
    ],
)
def test_impossible_shard_counts(
    sharded: bool | None,
    num_shard: int | None,
    visible: int | None,
    error: type[LaunchError],
    message: str,
) -> None:
    with pytest.raises(error) as raised:
        shard_count(sharded=sharded, num_shard=num_shard, visible=visible)
    assert (str(raised.value), raised.value.variant) == (message, error.__name__)
