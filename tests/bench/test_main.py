"""The command line, and what becomes of a peer that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
from bench.adapters.steps import random_adapter, with_adapters
from bench.comparison.cases import CASES
from bench.comparison.plan import Attempt
from bench.comparison.roofline import Machine
from bench.harness.checkpoints import Shape
from bench.harness.machine import FAMILIES, cpu_family
from bench.harness.paths import BENCH, PEERS_FOLDER
from bench.harness.quiet import Quiet
from bench.peers.dialects import LLAMA, VLLM
from bench.peers.engines import OURS
from bench.peers.process import EngineError
from bench.peers.servers import SERVERS, servers_held_to
from bench.quantized.__main__ import server_of
from bench.quantized.steps import BASE, CPU, KINDS, STEPS, Model
from bench.quick import (
    CODED,
    FLOORS,
    MODEL,
    PASSED,
    SLOWER,
    SOURCE,
    TOLERANCE,
    UNKNOWN,
    Figure,
    Finding,
    Unit,
    coded_steps,
    read_floors,
    write_floors,
    write_record,
)
from bench.startup import MB, Start, Starts

from millrace.load.apis import TGI, BadStreamError, Dialect
from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.lora.adapter_table import AdapterTable


def test_a_peers_failure_is_a_note_and_ours_an_error() -> None:
    notes: list[str] = []
    with Attempt("vllm", notes) as attempt:
        raise EngineError("vllm ended with 1:\nTraceback\nNo memory")
    assert attempt.failed
    assert notes == ["vllm took no further part: vllm ended with 1: No memory"]
    with pytest.raises(EngineError), Attempt(OURS, notes):
        raise EngineError("gone")
    with pytest.raises(KeyError), Attempt("vllm", notes):
        raise KeyError("a defect of the benchmark")
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("dialect", "last"),
    [
        (VLLM, {}),
        (VLLM, {"choices": [{"token_ids": [5], "finish_reason": None}]}),
        (LLAMA, {"stop": False, "tokens": [1]}),
        (LLAMA, {"stop": True, "tokens_predicted": 3}),
        (TGI, {"index": 4}),
    ],
)
def test_a_stream_without_its_end_is_no_stream(dialect: Dialect, last: dict[str, object]) -> None:
    with pytest.raises(BadStreamError):
        dialect.check_end(last, 4)


@pytest.mark.parametrize(
    ("value", "is_clean", "recorded", "status"),
    [
        (0.50, True, 0.50, PASSED),
        (0.90, True, 0.50, PASSED),
        (0.50 * TOLERANCE, True, 0.50, PASSED),
        (0.50 * TOLERANCE - 0.01, True, 0.50, SLOWER),
        (0.50 * TOLERANCE - 0.01, False, 0.50, UNKNOWN),
        (0.50, False, 0.50, PASSED),
        (0.50, True, None, UNKNOWN),
    ],
)
@pytest.mark.parametrize("unit", Unit)
def test_a_case_fails_only_below_its_recorded_floor(
    value: float, is_clean: bool, recorded: float | None, status: int, unit: Unit
) -> None:
    assert Finding(Figure("x", unit, value, is_clean), recorded).status == status


def test_a_finding_says_what_its_figure_is_a_multiple_of() -> None:
    share = Finding(Figure("one stream", Unit.ROOFLINE, 0.6604, True), 0.62)
    times = Finding(Figure("int4, 1 row", Unit.BFLOAT16, 2.224, False), None)
    assert (
        share.text == "one stream: 66.0 % of the roofline, recorded 62.0 % of the roofline: passed"
    )
    assert times.text == "int4, 1 row: ~2.22 times bfloat16, recorded nothing: unknown"


def test_floors_of_a_family_are_compared_with_that_family_only(tmp_path: Path) -> None:
    path = tmp_path / "floors.json"
    assert read_floors(path, "Zen 4") == {}
    write_floors(path, "Zen 4", {"one stream": 0.66006}, source="results/a.json")
    write_floors(path, "AVX2", {"one stream": 0.5}, source="results/b.json")
    write_floors(path, "Zen 4", {"int4, 1 row": 2.0}, source="results/c.json")
    assert read_floors(path, "Zen 4") == {"int4, 1 row": 2.0}
    assert read_floors(path, "AVX2") == {"one stream": 0.5}
    assert read_floors(path, "Zen 5") == read_floors(path, None) == {}


def test_recorded_floors_are_of_known_families_and_name_their_run() -> None:
    families = json.loads(FLOORS.read_text())
    cases = {case.name for case in CASES[MODEL]} | {f"{k}, {s}" for k in CODED for s in STEPS}
    for family, floors in families.items():
        assert family in FAMILIES
        assert floors.keys() - {SOURCE} <= cases
        run, _, command = floors[SOURCE].partition(",")
        assert (BENCH / run).exists()
        assert command == "" or command.split("`")[1] in (BENCH / run).read_text()


SMALL = Shape(
    hidden_size=64,
    num_layers=1,
    num_heads=2,
    num_key_value_heads=1,
    intermediate_size=128,
    vocab_size=256,
)


def test_every_kind_of_4_bits_is_measured_in_every_step() -> None:
    figures = coded_steps(SMALL, Quiet(idle_seconds=0.0, patience_seconds=0.0), threads=1)
    assert {each.case for each in figures} == {
        f"{kind}, {step}" for kind in CODED for step in STEPS
    }
    assert all(each.unit is Unit.BFLOAT16 and each.value > 0 for each in figures)


def test_steps_with_adapters_compute_something_else() -> None:
    load_operators()
    table = AdapterTable(CPU)
    model = Model(SMALL, KINDS[BASE], table)
    table.resize(2)
    for slot in (1, 2):
        table.put(slot, random_adapter(slot, table.parts))
    assert len(table.parts) == 7 * SMALL.num_layers
    step = model.step([3, 3], [1, 1])
    with torch.inference_mode():
        plain, adapted = step(), with_adapters(table, step, 2)()
        assert torch.equal(step(), plain)
    assert all(not torch.equal(one, other) for one, other in zip(plain, adapted, strict=True))


FACTS = {
    "Zen 4": ("AuthenticAMD", "25", "AMD EPYC", "avx2 avx512f avx512_vnni"),
    "Zen 5": ("AuthenticAMD", "26", "AMD EPYC", "avx2 avx512f avx_vnni"),
    "Xeon with AMX": ("GenuineIntel", "6", "Intel(R) Xeon(R) Processor", "avx2 avx512f amx_tile"),
    "Xeon without AMX": ("GenuineIntel", "6", "Intel(R) Xeon(R) Gold 6330", "avx2 avx512f"),
    "AVX2 with VNNI": ("GenuineIntel", "6", "Intel(R) Core(TM) Ultra 7", "avx avx2 avx_vnni"),
    "AVX2": ("AuthenticAMD", "25", "AMD Ryzen 5 5600", "avx avx2 fma"),
}
UNKNOWN_FACTS = [
    ("AuthenticAMD", "26", "AMD EPYC", "avx2 avx512f avx512_fp16"),
    ("AuthenticAMD", "27", "AMD EPYC", "avx2 avx512f"),
    ("GenuineIntel", "6", "11th Gen Intel(R) Core(TM) i7", "avx2 avx512f"),
    ("GenuineIntel", "6", "Intel(R) Xeon(R) E5-2620", "avx"),
    ("", "", "", ""),
]
NAMES = ("vendor_id", "cpu family", "model name", "flags")


def family_of(facts: tuple[str, ...], environ: dict[str, str] | None = None) -> str | None:
    return cpu_family(dict(zip(NAMES, facts, strict=True)).__getitem__, environ or {})


def test_the_family_of_a_cpu_is_known_or_none() -> None:
    assert {family: family_of(facts) for family, facts in FACTS.items()} == {
        family: family for family in FAMILIES
    }
    assert {family_of(facts) for facts in UNKNOWN_FACTS} == {None}
    held = {"ATEN_CPU_CAPABILITY": "avx2"}
    assert {family for family, facts in FACTS.items() if family_of(facts, held) != "AVX2"} == {
        "Zen 5",
        "AVX2 with VNNI",
    }
    assert family_of(FACTS["Zen 5"], held) == "AVX2 with VNNI"


def test_a_program_that_is_held_to_avx2_starts_again_without_avx512() -> None:
    program = (
        "import sys, torch; from bench.peers.servers import hold_to; hold_to('avx2');"
        "print(torch.backends.cpu.get_cpu_capability(), sys.argv[1:])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program, "--record"],
        cwd=BENCH.parent,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.split() == ["AVX2", "['--record']"]


def test_a_disturbed_run_records_nothing(tmp_path: Path) -> None:
    machine = Machine(read_one=1.0, read_all=2.0, multiply=1.0, threads=2)
    figures = [
        Figure("one stream", Unit.ROOFLINE, 0.6, True),
        Figure("int4, 1 row", Unit.BFLOAT16, 2.0, False),
    ]
    assert write_record(tmp_path / "floors.json", "Zen 4", figures, machine) == UNKNOWN
    assert list(tmp_path.iterdir()) == []


def test_both_servers_are_held_to_an_instruction_set() -> None:
    ours, llama = servers_held_to("avx2")
    assert (ours.name, llama.name) == (OURS, "llama.cpp")
    assert llama.program == PEERS_FOLDER / "llama-avx2" / ".installed"
    assert cast("partial[object]", llama.start).keywords == {"folder": PEERS_FOLDER / "llama-avx2"}
    environment = cast("partial[object]", ours.start).keywords["environment"]
    program = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    output = subprocess.check_output(
        [sys.executable, "-c", program], env={**os.environ, **environment}, text=True
    )
    assert output.strip() == "AVX2"
    assert servers_held_to(None) == SERVERS


def test_a_peer_that_cannot_be_held_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"vllm is no server held to avx2; these are: millrace, ll"
    ):
        server_of("vllm:bf16", "135m", (), "avx2")


def test_the_rest_is_the_memory_outside_weights_and_kv_cache() -> None:
    start = Start(
        ready_seconds=4.0,
        cpu_seconds=6.0,
        load_seconds=2.0,
        read_seconds=1.5,
        shard_bytes=1000 * MB,
        router_bytes=100 * MB,
        other_cores=0.0,
    )
    row = Starts(model="a", weights_bytes=300 * MB, kv_bytes=90 * MB, starts=[start]).row
    assert row == ("a", "4.00", "6.00", "2.00", "1.50", "0.75", "1000", "300", "90", "610", "100")
