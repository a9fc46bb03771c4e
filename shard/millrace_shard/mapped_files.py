"""Which tensors lie in mapped files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

ON_LINUX = sys.platform == "linux"
MAPS = Path("/proc/self/maps")


class MappedFiles:
    """The places where this process has files mapped now (proc_pid_maps(5))."""

    def __init__(self, paths: Sequence[Path]) -> None:
        names = {str(path.resolve()) for path in paths}
        text = MAPS.read_text(errors="surrogateescape") if ON_LINUX else ""
        lines = [line.split(maxsplit=5) for line in text.split("\n")]
        self._places = [
            tuple(int(end, 16) for end in line[0].split("-"))
            for line in lines
            if line[5:] and line[5] in names
        ]

    def hold(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in one of them; elsewhere than on Linux, where nobody knows, it may."""
        if not ON_LINUX:
            return tensor.device.type == "cpu"
        address = tensor.data_ptr()
        return any(begin <= address < end for begin, end in self._places)
