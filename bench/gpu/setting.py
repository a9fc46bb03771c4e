"""The setting of a stage: device, sizes, flags and the time until which it may run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.gpu.engine.scale import Scale
from bench.gpu.figures import Figure

Emit = Callable[[Figure], None]


class UnusableError(Exception):
    """No stage can work on this device or host; the message is one line, with the reason."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The device, the sizes and the flags of a stage.

    On CPU the kernels for CUDA run in Triton's interpreter, and servers on the kernels for CPUs.
    """

    device: torch.device
    scale: Scale
    out: Path
    deadline: float
    """The time of `time.monotonic` at which the stage should end."""
    shard_flags: tuple[str, ...] = ()
    """More flags for the shard."""
    checkpoint: Path | None = None
    """A published checkpoint to compare, if there is one."""

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of every shard: the device and the user's. Everything else is the default that users get."""
        return (f"--device={self.device.type}", *self.shard_flags)

    def seconds_left(self) -> float:
        """Time until the stage should end, at least a second: a limit for its children."""
        return max(1.0, self.deadline - time.monotonic())

    def has_time_for(self, seconds: float) -> bool:
        """Whether work of so many seconds fits."""
        return self.deadline - time.monotonic() > seconds


@contextmanager
def shown_on_exit(log: Path) -> Iterator[None]:
    """Print the end of `log` if the block ends with an exception, a timeout included."""
    try:
        yield
    except BaseException:
        if log.exists():
            lines = log.read_text(errors="replace").splitlines()
            print("\n".join(["the end of the server's log:", *lines[-20:]]), flush=True)
        raise
