"""The first stage of `make bench-gpu` and the samples of clocks, on texts in the format of `nvidia-smi`."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench.gpu import goals, smi
from bench.gpu.checks import preflight
from bench.gpu.children import Ended
from bench.gpu.engine.checkpoint import num_bytes
from bench.gpu.engine.scale import SCALES
from bench.gpu.figures import Figure
from bench.gpu.page import Results
from bench.gpu.peaks import PEAKS, peak_of
from bench.gpu.plan import Stage
from bench.gpu.setting import Setting, UnusableError
from bench.gpu.smi import Sample

A, B = "GPU-8a1b", "GPU-9c2d"
STATES = f"""\
0, {A}, NVIDIA H100 80GB HBM3, 580.65.06, 81559, 80995, Enabled, Enabled, Default, Disabled, 5, 5, 16, 16, 1980, 2619, 700.00
1, {B}, NVIDIA GeForce RTX 4090, 580.65.06, 24564, 24210, Disabled, [N/A], Default, [N/A], 1, 4, 8, 16, 3105, 10501, 450.00
"""  # noqa: E501 - as the program writes them
PROCESSES = f"""\
{A}, {os.getpid()}, 530, python
{A}, 4242, 61234, /usr/bin/tritonserver --model a,b
{A}, 4243, [N/A], [Insufficient Permissions]
{B}, 4244, 12, /usr/bin/Xorg
"""
TOPOLOGY = """\
\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tPHB\tSYS\t0-47\t0\t\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
"""
SCALE = SCALES["8b"]


def host(**changes: object) -> preflight.Host:
    states = smi.read_rows(STATES, smi.STATE)
    default = preflight.Host(
        state=states[0],
        others=(),
        free_memory=80 << 30,
        free_disk=100 << 30,
        cache=Path("/cache"),
        missing=None,
    )
    return replace(default, **changes)  # type: ignore[arg-type]


def test_states_of_several_gpus_have_none_for_what_is_not_reported() -> None:
    first, second = smi.read_rows(STATES, smi.STATE)
    assert (first["name"], first["memory.total"], first["ecc.mode.current"]) == (
        "NVIDIA H100 80GB HBM3",
        "81559",
        "Enabled",
    )
    assert (second["uuid"], second["ecc.mode.current"], second["mig.mode.current"]) == (
        B,
        None,
        None,
    )
    assert smi.read_rows("No devices were found\n", smi.STATE) == []


def test_a_field_that_the_driver_does_not_know_leaves_the_others(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        """#!/bin/sh
case "$1" in
*,*|*=mig.mode.current) echo 'Field "mig.mode.current" is not a valid field to query.'; exit 2;;
*=uuid) printf 'GPU-8a1b\\nGPU-9c2d\\n';;
*=ecc.mode.current) printf 'Enabled\\n[N/A]\\n';;
*) printf '1\\n2\\n';;
esac
"""
    )
    program.chmod(0o755)
    first, second = smi.states(str(program))
    assert (first["uuid"], first["ecc.mode.current"], first["mig.mode.current"]) == (
        A,
        "Enabled",
        None,
    )
    assert (second["uuid"], second["ecc.mode.current"], second["memory.free"]) == (B, None, "2")
    assert smi.states(str(tmp_path / "missing")) == []


def test_processes_are_those_of_the_gpu_without_this_one() -> None:
    assert list(preflight.other_processes(PROCESSES, A)) == [
        "tritonserver --model a,b (pid 4242, 61234 MiB)",
        "unknown (pid 4243)",
    ]
    assert list(preflight.other_processes("", A)) == []


def test_links_are_the_row_of_the_gpu_without_network_cards() -> None:
    assert smi.read_links(TOPOLOGY, 1) == {"GPU0": "NV18", "GPU2": "PHB"}
    assert smi.read_links("", 0) == {}


def test_a_host_on_which_stages_cannot_work_is_an_obstacle() -> None:
    assert preflight.obstacle(host(), SCALE) is None
    # nvidia-smi is missing in some containers.
    assert preflight.obstacle(host(state={}), SCALE) is None
    exclusive = {**host().state, "compute_mode": "Exclusive_Process"}
    others = ("tritonserver (pid 4242, 61234 MiB)",)
    lines = [
        preflight.obstacle(each, SCALE)
        for each in (
            host(state=exclusive),
            host(missing="Triton needs a C compiler: install gcc, or name one by CC"),
            host(free_memory=num_bytes(SCALE.model), others=others),
            host(free_disk=1 << 20),
        )
    ]
    for line, words in zip(
        lines,
        ("Exclusive_Process", "C compiler", "tritonserver (pid 4242", "/cache has"),
        strict=True,
    ):
        assert line is not None
        assert words in line
        assert "\n" not in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")
def test_a_gpu_that_torch_cannot_use_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    emitted: list[Figure] = []
    setting = Setting(torch.device("cuda"), SCALE, tmp_path, time.monotonic() + 60)
    with pytest.raises(UnusableError, match=r"torch .*CUDA"):
        preflight.run(setting, emitted.append)
    assert [figure.name for figure in emitted] == ["machine"]


def test_what_lowers_figures_is_noted() -> None:
    second = smi.read_rows(STATES, smi.STATE)[1]
    assert list(preflight.notes(host(), SCALE)) == []
    text = "; ".join(preflight.notes(host(state=second, free_memory=24 << 30), SCALE))
    for words in ("persistence mode is off", "8 of 16 lanes", "largest batches need"):
        assert words in text
    assert preflight.shown(host(state=second), {})["ECC"] == "not reported"


LINES = f"""\
2026/11/29 05:10:00.103, {A}, 1980, 2619, 41, 214.33, 0x0000000000000000
2026/11/29 05:10:00.104, {B}, 210, 405, 33, [N/A], 0x0000000000000001
2026/11/29 05:10:00.603, {A}, 1410, 2619, 62, 699.80, 0x0000000000000024
Unable to determine the device handle for GPU0000:81:00.0: GPU is lost.
2026/11/29 05:10:01.103, {A}, [Unknown Error], 2619, 62, 699.80, [N/A]
"""


def samples() -> list[Sample]:
    return [sample for line in LINES.splitlines() if (sample := smi.read_sample(line))]


def test_a_sample_has_the_reasons_that_lower_figures() -> None:
    first, other, capped, unknown = samples()
    assert (first.sm_mhz, first.celsius, first.throttles) == (1980, 41, ())
    # Idleness throttles nothing.
    assert (other.uuid, other.watts, other.throttles) == (B, None, ())
    assert capped.throttles == ("power cap", "heat")
    assert capped.moment - first.moment == pytest.approx(0.5)
    assert (unknown.sm_mhz, unknown.throttles) == (None, ())


def test_the_sampler_reads_what_the_program_writes(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    (tmp_path / "lines").write_text(LINES)
    # As a driver before 535, which does not know the new field.
    program.write_text(
        f"""#!/bin/sh
case "$1" in
*event_reasons*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2;;
--query-gpu=timestamp*) cat {tmp_path}/lines; touch {tmp_path}/written; exec sleep 60;;
esac
"""
    )
    program.chmod(0o755)
    with smi.Sampler(str(program)) as sampler:
        while len(sampler.between(0, float("inf"))) < 4:
            time.sleep(0.01)
    assert sampler.between(0, float("inf")) == samples()
    with smi.Sampler(str(tmp_path / "missing")) as nothing:
        assert nothing.between(0, float("inf")) == []


STAGE = Stage("bench.gpu.speed.decode", "?", 1, 1)


def decode_from(name: str, began: float, ended: float) -> Figure:
    detail = {"bytes": 16e9}
    return Figure(
        name=name, kind=goals.DECODE, value=5.0, unit="ms", detail=detail, began=began, ended=ended
    )


def test_figures_measured_while_throttled_are_marked(tmp_path: Path) -> None:
    first, _, capped, _ = samples()
    machine = Figure(
        name="machine", value=8, unit="cores", detail={"uuid": A, "gpu": "NVIDIA H100 80GB HBM3"}
    )
    limit = Figure(name="r", kind=goals.READ_RATE, value=3015.0, unit="GB/s")
    early = decode_from("early", first.moment - 1, first.moment + 0.1)
    late = decode_from("late", capped.moment - 0.1, capped.moment + 1)
    results = Results(tmp_path, device="cuda", shape="8b")
    results.add(STAGE, Ended("ok", 3.0, ()), [machine, limit, early, late], samples())
    lines = {
        line.split("|")[1].strip(): line for line in results.text().splitlines() if "|" in line
    }
    assert "throttled" not in lines["early"]
    assert "5 ms (throttled: power cap in 1 of 2 samples, heat in 1 of 2 samples)" in lines["late"]
    cells = [cell.strip() for cell in lines["decode"].strip("|").split("|")]
    assert cells[1:4] == ["3", "1410 to 1980", "2619 to 2619"]
    assert "memory read 3015 GB/s, 90% of the data sheet" in results.text()


def test_a_stopped_run_has_its_reason_on_the_page(tmp_path: Path) -> None:
    results = Results(tmp_path, device="cuda", shape="8b")
    results.add(STAGE, Ended("unusable", 1.0, ("NVIDIA's driver is 470.57",)), [])
    assert "NVIDIA's driver is 470.57" in results.text()
    assert "No data sheet of this device is known here." in results.text()
    assert not results.is_whole


def test_the_peak_is_that_of_the_product_and_not_of_a_longer_name() -> None:
    assert peak_of("NVIDIA H100 80GB HBM3") == PEAKS["H100"]
    assert peak_of("NVIDIA H100 PCIe") == PEAKS["H100 PCIe"]
    assert peak_of("NVIDIA A100-SXM4-40GB") == PEAKS["A100-SXM4-40GB"]
    assert peak_of("NVIDIA L40S") == PEAKS["L40S"]
    assert peak_of("NVIDIA L4") == PEAKS["L4"]
    assert peak_of("NVIDIA T400 4GB") is None
