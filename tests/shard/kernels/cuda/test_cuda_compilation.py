"""Every kernel compiles to machine code for two generations of GPUs, of which none need be here."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="no Triton for this platform")

ROOT = Path(__file__).parents[4]
PROGRAM = ROOT / "tests/support/millrace_testing/engines/compile_kernels.py"
NUM_PROCESSES = 2
NO_SPILLS = {(90, "torch.bfloat16"), (90, "torch.float16")}
INSTRUCTION = re.compile(r"versionMajor = (\d+).*instrShape = \[(\d+), (\d+)(?:, (\d+))?\]")


def compile_kernels(cache: Path, *arguments: list[str]) -> list[dict[str, Any]]:
    """The facts of every kernel, from a process for each list of arguments."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    running = [
        subprocess.Popen(
            [sys.executable, PROGRAM, *each],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in arguments
    ]
    done = [(process, *process.communicate()) for process in running]
    for process, _, errors in done:
        assert process.returncode == 0, errors
    return [json.loads(line) for _, output, _ in done for line in output.splitlines()]


def instructions(compiled: dict[str, Any]) -> set[tuple[str, ...]]:
    """Version, rows and depth of the tensor cores' instructions in a linear; the rows of x are its other side."""
    found = (INSTRUCTION.search(each) for each in compiled["products"])
    return {(each[1], each[2], each[4] or each[3]) for each in found if each is not None}


def most_stack(compiled: dict[str, Any]) -> int:
    """Bytes of registers per thread that may be spilled: none on Hopper by the tensor cores, some on older GPUs."""
    return 0 if (compiled["capability"], compiled["dtype"]) in NO_SPILLS else 400


def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    compiled = compile_kernels(tmp_path, [])
    names = {each["name"] for each in compiled}
    assert names >= {"attend_tiles", "attend_spans", "fold_spans", "_multiply", "_add_parts"}
    assert [each for each in compiled if not each["fits"]] == []


@pytest.mark.ecosystem
def test_served_shapes_fit_and_compute_alike_in_prompts_and_decodes(tmp_path: Path) -> None:
    """Equal bits need equal layouts: a sum over an axis is taken in an order that follows from the layout."""
    work = [["served", str(i), str(NUM_PROCESSES)] for i in range(NUM_PROCESSES)]
    compiled = compile_kernels(tmp_path, *work)
    assert [each for each in compiled if not each["fits"]] == []
    assert [each for each in compiled if each["stack"] > most_stack(each)] == []
    attention = [each for each in compiled if each["name"].startswith("attend")]
    differing = [
        (prompts, decodes)
        for prompts, decodes in zip(attention[::2], attention[1::2], strict=True)
        if prompts["fixed"]
        and any(prompts[key] != decodes[key] for key in ("products", "reductions"))
    ]
    assert differing == []
    for key, group in itertools.groupby(
        (each for each in compiled if each["name"] == "_multiply"),
        lambda each: (each["capability"], each["dtype"]),
    ):
        kinds = [instructions(each) for each in group]
        assert all(each == kinds[0] for each in kinds), key
        assert kinds[0] or key[1] == "torch.float32"
