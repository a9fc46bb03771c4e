"""Every kernel compiles to machine code for six generations of GPUs, of which none need be here."""

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

from millrace_proto.cores import usable_cores

pytest.importorskip("triton", reason="no Triton for this platform")

ROOT = Path(__file__).parents[4]
PROGRAM = ROOT / "tests/support/millrace_testing/engines/compile_kernels.py"
NUM_PROCESSES = max(2, usable_cores())
CAPABILITIES = os.environ.get("MILLRACE_TEST_CAPABILITIES", "90 80").split()
"""Those that served shapes are compiled for."""
EVERY = int(os.environ.get("MILLRACE_TEST_EVERY", "24"))
"""One shape of so many is compiled: all of them for six capabilities take an hour on two cores."""
LINEARS = ("_multiply", "_multiply_codes")
CODED = ("_multiply_codes", "multiply_expert_codes")
USUAL_HEAD_DIM = 128
ALL_FORMATS = 90
"""The capability for which linears over other formats are compiled, too."""
TENSOR_CORES_OF_HOPPER = {(90, "torch.bfloat16"), (90, "torch.float16")}
INSTRUCTION = re.compile(r"versionMajor = (\d+).*instrShape = \[(\d+), (\d+)(?:, (\d+))?\]")


def compile_kernels(cache: Path, *arguments: list[str]) -> list[dict[str, Any]]:
    """The facts of every kernel, from a process for each list of arguments."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    running = []
    for number, each in enumerate(arguments):
        # Files, since a process would wait on a full pipe while another one is read.
        output = cache / f"{number}.jsonl"
        with output.open("w") as out, output.with_suffix(".log").open("w") as log:
            command = [sys.executable, str(PROGRAM), *each]
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=log)
        running.append((process, output))
    for process, output in running:
        assert process.wait() == 0, output.with_suffix(".log").read_text()
    return [json.loads(line) for _, output in running for line in output.read_text().splitlines()]


def instructions(compiled: dict[str, Any]) -> set[tuple[str, ...]]:
    """Version, rows and depth of the tensor cores' instructions in a linear; the rows of x are its other side.

    Those of sm_100 sum in a memory of their own, 64 or 128 rows; only a device shows whether both have the same bits.
    """
    if any("tensor_memory_encoding" in each for each in compiled["products"]):
        return {("5",)}
    result = (INSTRUCTION.search(each) for each in compiled["products"])
    return {(each[1], each[2], each[4] or each[3]) for each in result if each is not None}


def most_stack(compiled: dict[str, Any]) -> int:
    """Bytes of registers per thread that may be spilled: none on Hopper by the tensor cores for usual heads.

    Linears over codes hold three sums of a tile, and spill more with the tile for many rows; attention over codes holds
    their numbers. Prompts over latents hold 512 sums of each row.
    """
    is_coded = compiled["name"] in CODED or compiled.get("codes", 0) > 0
    if compiled["name"].startswith("attend_latent"):
        return 280
    if (compiled["capability"], compiled["dtype"]) not in TENSOR_CORES_OF_HOPPER:
        return 480 if is_coded else 400
    return 32 if is_coded or compiled.get("head_dim", 0) > USUAL_HEAD_DIM else 0


@pytest.mark.long
def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    compiled = compile_kernels(tmp_path, [])
    names = {each["name"] for each in compiled}
    assert names >= {"attend_tiles", "attend_spans", "fold_spans", "_multiply", "_add_parts"}
    assert names >= {*CODED, "_sum_steps", "_shrink", "_expand", "expand_codes", "code_rows"}
    assert {each["capability"] for each in compiled} == {80, 86, 89, 90, 100, 120}
    assert names >= {"choose", "group_pairs", "multiply_experts", "clamped_swiglu", "add_experts"}
    assert names >= {"convolve", "shift", "delta", "gated_norm", "scan", "scan_channels"}
    assert names >= {
        "attend_latent_tiles",
        "attend_latent_spans",
        "multiply_heads",
        "store_latents",
    }
    assert [each for each in compiled if not each["fits"]] == []
    # On these there are int4, int8, e2m1 and e4m3, of which no code is converted as an integer; two divisions are.
    coded = [
        each for each in compiled if each["name"] in CODED and each["capability"] != ALL_FORMATS
    ]
    assert [each for each in coded if each["conversions"] > 2] == []
    assert coded


@pytest.mark.ecosystem
def test_served_shapes_fit_and_compute_alike_in_prompts_and_decodes(tmp_path: Path) -> None:
    """Equal bits need equal layouts: a sum over an axis is taken in an order that follows from the layout."""
    step = str(EVERY * NUM_PROCESSES)
    work = [["served", str(i), step, *CAPABILITIES] for i in range(NUM_PROCESSES)]
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
        (each for each in compiled if each["name"] in LINEARS),
        lambda each: (each["name"], each["capability"], each["dtype"]),
    ):
        kinds = [instructions(each) for each in group]
        assert all(each == kinds[0] for each in kinds), key
        assert kinds[0] or key[2] == "torch.float32"
