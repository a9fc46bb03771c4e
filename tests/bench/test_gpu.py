"""`make bench-gpu` as a whole: stages in processes of their own, none of which takes the others along."""

from __future__ import annotations

import gzip
import importlib
import json
import math
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from bench.gpu import goals
from bench.gpu.__main__ import Command, main
from bench.gpu.children import SHARED_MEMORY, UNUSABLE, Ended, run, scratch_prefix
from bench.gpu.engine import profile
from bench.gpu.engine.checkpoint import num_bytes, write_weights
from bench.gpu.engine.measure import decode_bytes, prefill_flops
from bench.gpu.engine.profile import LONGEST, Event, activity_of, longest
from bench.gpu.engine.random_weights import read_description
from bench.gpu.engine.scale import SCALES, TINY
from bench.gpu.engine.session import opened
from bench.gpu.figures import Figure, append, check, read, unchecked
from bench.gpu.page import NO_GPU, Results
from bench.gpu.plan import STAGES, TOTAL_SECONDS, Stage, limit_seconds
from bench.gpu.setting import Setting
from bench.gpu.speed import decode, rates, vllm
from bench.harness.checkpoints import EMBEDDING, describe, tensor_shapes
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache

STAGE_SECONDS = 60.0
DEVICE_AND_SHAPE = ["--device=cpu", "--shape=tiny"]


def python(code: str, *arguments: str) -> tuple[str, tuple[str, ...]]:
    ended = run(
        [sys.executable, "-c", code, *arguments],
        environment=os.environ,
        cwd=Path.cwd(),
        limit_seconds=STAGE_SECONDS,
    )
    return ended.status, ended.tail


class ExceedsItsBound(subprocess.Popen[str]):
    """A stage named `endless` whose time is up as soon as it has written to the pipe that its output names."""

    is_told = False

    def wait(self, timeout: float | None = None) -> int:
        """Wait as `Popen` does; the first time, raise once the stage has written."""
        assert isinstance(self.args, list)
        if "endless" not in self.args or self.is_told:
            return super().wait(timeout)
        self.is_told = True
        (out,) = (word.partition("=")[2] for word in self.args if word.startswith("--out="))
        reader = os.open(Path(out) / "told", os.O_RDONLY | os.O_NONBLOCK)
        readable, _, _ = select.select([reader], [], [], STAGE_SECONDS)
        os.close(reader)
        assert readable
        raise subprocess.TimeoutExpired(self.args, timeout or 0.0)


class TakesTooLong(subprocess.Popen[str]):
    """A child whose time is up as soon as it has opened the pipe that its last argument names."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait as `Popen` does; with the limit, raise at once."""
        if timeout != STAGE_SECONDS:
            return super().wait(timeout)
        assert isinstance(self.args, list)
        Path(self.args[-1]).read_bytes()
        raise subprocess.TimeoutExpired(self.args, timeout)


def has_ended(pid: int) -> bool:
    """Whether the process ends: one that was killed may take a moment."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([process], [], [], STAGE_SECONDS)
    os.close(process)
    return bool(ended)


def test_the_exit_status_of_a_child_decides_its_outcome() -> None:
    assert python("print('a'); print('b')") == ("ok", ("a", "b"))
    assert python(f"raise SystemExit({UNUSABLE})")[0] == "unusable"
    status, tail = python("raise ValueError('no')")
    assert status == "failed"
    assert tail[-1] == "ValueError: no"


def test_nothing_outlives_a_child_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "told")
    monkeypatch.setattr("bench.gpu.children.subprocess.Popen", TakesTooLong)
    # The grandchild is in a session of its own, as a server is.
    code = f"""
import os, signal, subprocess, sys, tempfile
sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
child = subprocess.Popen(sleeper, start_new_session=True, stdout=subprocess.DEVNULL)
folder = tempfile.mkdtemp(prefix=f"millrace-bench-{{os.getpid()}}-", dir={str(SHARED_MEMORY)!r})
print(child.pid, os.getpid(), folder, flush=True)
open(sys.argv[1], "w").close()
signal.pause()
"""
    status, tail = python(code, str(tmp_path / "told"))
    assert status == "timed out"
    grandchild, child, folder = tail[0].split()
    assert has_ended(int(grandchild))
    assert Path(folder).name.startswith(scratch_prefix(int(child)))
    assert not Path(folder).exists()


def test_the_first_stage_runs_with_any_selection_of_stages() -> None:
    def names(*argv: str) -> list[str]:
        return [stage.name for stage in Command.read(argv).stages]

    assert names("--stages=prefill,decode") == ["preflight", "decode", "prefill"]
    assert names() == [stage.name for stage in STAGES]
    assert Command.read([]).device == "auto"


GOOD = """
from bench.gpu.figures import check

def run(setting, emit):
    emit(check(f"{__name__} on {setting.device}", 0, "x"))
"""
FAILING = """
from bench.gpu.figures import check

def run(setting, emit):
    emit(check("before the failure", 0, "x"))
    raise ValueError("it is broken")
"""
ENDLESS = """
import signal
from bench.gpu.figures import check

def run(setting, emit):
    emit(check("before the bound", 0, "x"))
    with (setting.out / "told").open("w") as pipe:
        pipe.write("told")
    signal.pause()
"""
SOURCES = {"first": GOOD, "failing": FAILING, "endless": ENDLESS, "last": GOOD}


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Stage]:
    """Stages in a folder of their own, one of which fails, and one of which never ends."""
    sources = tmp_path / "stages"
    sources.mkdir()
    for name, text in SOURCES.items():
        (sources / f"{name}.py").write_text(text)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(sources), os.environ.get("PYTHONPATH", "")])
    )
    os.mkfifo(tmp_path / "told")
    return [Stage(name, f"Does {name} run?", 1, 1) for name in SOURCES]


def test_a_run_goes_on_after_a_stage_that_fails_and_one_that_exceeds_its_bound(
    tmp_path: Path, stages: list[Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.gpu.children.subprocess.Popen", ExceedsItsBound)
    assert main([*DEVICE_AND_SHAPE, f"--out={tmp_path}"], stages) == 1
    content = json.loads((tmp_path / "gpu.json").read_text())
    ends = {name: ended["status"] for name, ended in content["stages"].items()}
    assert ends == {"first": "ok", "failing": "failed", "endless": "timed out", "last": "ok"}
    assert content["stages"]["failing"]["tail"][-1] == "ValueError: it is broken"
    assert [figure["name"] for figure in content["figures"]] == [
        "first on cpu",
        "before the failure",
        "before the bound",
        "last on cpu",
    ]
    page = (tmp_path / "gpu.md").read_text()
    assert "ValueError: it is broken" in page
    assert NO_GPU in page


MOST_SECONDS = 600
"""Ten minutes."""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_stages_that_use_all_their_time_end_with_the_run(device: str) -> None:
    shares = [stage.share_on(device) for stage in STAGES]
    left = TOTAL_SECONDS
    for place in range(len(shares)):
        limit = limit_seconds(shares[place:], left)
        assert limit >= 0.9 * shares[place]
        left -= limit
    assert left == pytest.approx(0)
    assert TOTAL_SECONDS < MOST_SECONDS


LIMITS = [
    Figure(name="r", kind=goals.READ_RATE, value=3000.0, unit="GB/s"),
    Figure(name="c", kind=goals.COPY_RATE, value=4000.0, unit="GB/s"),
    Figure(name="m", kind=goals.MATRIX_RATE, value=800.0, unit="TFLOP/s"),
]


def verdicts(figures: list[Figure]) -> dict[str, tuple[str, str]]:
    lines = [*goals.checks(figures), *goals.speeds(figures)]
    return {line.case: (line.reached, line.verdict) for line in lines}


def decode_figure(milliseconds: float) -> Figure:
    return Figure(
        name="d", kind=goals.DECODE, value=milliseconds, unit="ms", detail={"bytes": 16e9}
    )


def test_a_decode_is_held_against_the_faster_of_reading_and_copying() -> None:
    # 16 GB at 4000 GB/s are 4 ms.
    assert verdicts([*LIMITS, decode_figure(4.5)])["d"] == ("88.9%", "met")
    assert verdicts([*LIMITS, decode_figure(5.0)])["d"] == ("80.0%", "missed")
    assert verdicts([decode_figure(4.5)])["d"] == ("", "not measured")


def test_ratios_need_both_sides() -> None:
    engine = Figure(name="e", kind=goals.ENGINE, value=1000.0, unit="tok/s")
    server = Figure(name="s", kind=goals.SERVER, value=930.0, unit="tok/s")
    peer = Figure(name="t", kind=goals.PEER, value=600.0, unit="tok/s")
    found = verdicts([engine, server, peer])
    assert found["server against engine"] == ("0.930 x", "met")
    assert found["engine against transformers"] == ("1.667 x", "missed")
    assert "engine against vLLM" not in found
    vllm = Figure(name="v", kind=goals.VLLM, value=1250.0, unit="tok/s")
    assert verdicts([engine, vllm])["engine against vLLM"] == ("0.800 x", "missed")
    assert verdicts([server, peer])["server against engine"] == ("", "not measured")


def test_a_check_holds_up_to_its_bound() -> None:
    found = {
        figure.name: goals.checks([figure])[0].verdict
        for figure in (
            check("at the bound", 0.5, "x", most=0.5),
            check("above it", 0.51, "x", most=0.5),
            check("not a number", math.nan, "x", most=0.5),
            unchecked("not made", "no tool"),
        )
    }
    assert found == {
        "at the bound": "met",
        "above it": "missed",
        "not a number": "missed",
        "not made": "not measured",
    }
    assert goals.checks([unchecked("not made", "no tool")])[0].measured == "no tool"


def test_figures_are_kept_when_their_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    assert read(path) == []
    append(path, decode_figure(4.0))
    append(path, decode_figure(5.0))
    append(path, LIMITS[0])
    with path.open("a") as file:
        file.write('{"name": "half')
    assert read(path) == [decode_figure(5.0), LIMITS[0]]


FIRST = Stage("checks.first", "Is it first?", 1, 1)
DECODE = Figure(name="d", kind=goals.DECODE, value=4.5, unit="ms", detail={"bytes": 16e9})
READ_LIMIT = [Figure(name="r", kind=goals.READ_RATE, value=4000.0, unit="GB/s")]


def results(folder: Path, *figures: Figure, device: str = "cuda") -> Results:
    """The results of one stage."""
    found = Results(folder, device=device, shape="8b")
    found.add(FIRST, Ended("ok", 3.0, ()), figures)
    return found


def test_a_page_without_a_gpu_notes_its_absence_and_omits_speeds(tmp_path: Path) -> None:
    found = results(tmp_path, *READ_LIMIT, DECODE, device="cpu")
    assert NO_GPU in found.text()
    assert "88.9%" not in found.text()
    assert json.loads(found.json_path.read_text())["is_of_a_gpu"] is False
    page = results(tmp_path, *READ_LIMIT, DECODE).text()
    assert NO_GPU not in page
    assert "88.9%" in page


def test_a_run_in_which_a_check_is_missed_is_not_whole(tmp_path: Path) -> None:
    assert results(tmp_path, check("a", 0.5, "x", most=0.5), unchecked("b", "no tool")).is_whole
    assert not results(tmp_path, check("a", 0.6, "x", most=0.5)).is_whole
    assert not results(tmp_path, check("a", float("nan"), "x", most=0.5)).is_whole


CPU = torch.device("cpu")
SCALE = SCALES["tiny"]
LIMIT_SECONDS = 300.0
PLAIN = "--disable-custom-kernels"


def figures_of(stage: object, tmp_path: Path) -> list[Figure]:
    """On plain torch, which is faster than the interpreter."""
    found: list[Figure] = []
    setting = Setting(CPU, SCALE, tmp_path, time.monotonic() + LIMIT_SECONDS, (PLAIN,))
    stage.run(setting, found.append)  # type: ignore[attr-defined]
    return found


def peer(tmp_path: Path) -> torch.nn.Module:
    config = read_description(tmp_path, TINY)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="eager"
    )
    return model.eval()


def test_decodes_of_every_batch_and_a_whole_load_are_measured(tmp_path: Path) -> None:
    *decodes, engine = [f for f in figures_of(decode, tmp_path) if f.kind != goals.ACTIVITY]
    (trace,) = (figure for figure in decodes if figure.kind == goals.TRACE)
    with gzip.open(tmp_path / trace.detail["file"], "rt") as file:
        assert json.load(file)["traceEvents"]
    assert trace.detail["work"] == f"a prompt of {SCALE.context} and 4 decodes of 2"
    decodes = [figure for figure in decodes if figure.kind == goals.DECODE]
    assert [figure.detail["rows"] for figure in decodes] == list(SCALE.batches)
    assert engine.kind == goals.ENGINE
    for figure in (*decodes, engine):
        assert math.isfinite(figure.value)
        assert figure.value > 0
    # Earlier batches decode the same sequences: the first one is by now the longest.
    first = SCALE.context + SCALE.num_warm_ups + SCALE.num_steps / 2
    assert decodes[0].detail["bytes"] == decode_bytes(TINY, first)
    second = first + SCALE.num_warm_ups + SCALE.num_steps
    assert decodes[1].detail["bytes"] == decode_bytes(TINY, first + second)


VLLM = """
class TokensPrompt(dict):
    pass

class SamplingParams:
    def __init__(self, **options):
        self.left = options["max_tokens"]

class LLM:
    def __init__(self, **options):
        assert options["max_num_seqs"] == 4 and options["enforce_eager"]
        self.llm_engine = self
        self.running = {}

    def add_request(self, request_id, prompt, parameters):
        assert len(prompt["prompt_token_ids"]) == 16
        self.running[request_id] = parameters

    def step(self):
        from types import SimpleNamespace
        for name, parameters in list(self.running.items()):
            parameters.left -= 1
            if not parameters.left:
                del self.running[name]
            # As later versions name requests inside the engine.
            request = SimpleNamespace(token_ids=[1])
            yield SimpleNamespace(
                request_id=f"{name}-a1b2", outputs=[request], finished=not parameters.left
            )
"""


def test_the_load_runs_on_vllm_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (missing,) = figures_of(vllm, tmp_path)
    assert missing.text() == "the load on vLLM: not checked, vLLM is not installed here"
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(VLLM)
    (tmp_path / "vllm" / "sampling_params.py").write_text(
        "from types import SimpleNamespace\nRequestOutputKind = SimpleNamespace(DELTA=1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    figures = figures_of(vllm, tmp_path)
    for name in ("vllm", "vllm.sampling_params", "bench.peers.vllm_engine"):
        monkeypatch.delitem(sys.modules, name)
    assert [figure.kind for figure in figures] == [goals.VLLM] * vllm.RUNS
    assert figures[-1].name == "vLLM, 4 x (16 in, 8 out)"
    assert figures[-1].value > 0


def test_the_idle_share_is_the_time_in_which_no_work_runs() -> None:
    events = [
        Event("kernel", True, 10, 20),
        # Two that begin within the one before, the first of which ends first.
        Event("kernel", True, 12, 15),
        Event("kernel", True, 16, 25),
        Event("Memcpy HtoD", True, 30, 40),
        Event("cudaLaunchKernelExC", False, 0, 1),
        Event("cuLaunchKernel", False, 1, 2),
        Event("cudaGraphLaunch", False, 2, 3),
        Event("cudaEventSynchronize", False, 3, 4),
        Event("aten::add", False, 0, 100),
    ]
    found = activity_of(events, 2)
    assert found is not None
    assert found.pop("idle") == pytest.approx(1 / 6)
    assert found == {"launches": 1.5, "copies": 0.5, "waits": 0.5}
    assert activity_of(events[4:], 2) is None


def test_the_longest_kernels_are_those_with_the_most_time_in_all(tmp_path: Path) -> None:
    events = [Event(f"short {number}", True, 0, 1) for number in range(LONGEST)]
    events += [Event("a|b", True, 10, 12), Event("a|b", True, 13, 14), Event("host", False, 0, 99)]
    rows = longest(events)
    assert len(rows) == LONGEST
    assert rows[0][:3] == ("a|b", 2, 0.003)
    assert rows[0][3] == pytest.approx(3 / 13)
    detail = {"file": "trace.json.gz", "work": "some steps", "kernels": rows}
    trace = Figure(name="trace", kind=goals.TRACE, value=2e6, unit="bytes", detail=detail)
    page = results(tmp_path, trace).text()
    assert "Trace of some steps: trace.json.gz, 2.0 MB." in page
    assert "| a/b " in page
    assert "| 2    | 0.00 | 23.1% " in page


def test_a_trace_that_is_too_large_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "MOST_BYTES", 1)
    with opened(TINY, SCALE, CPU, ["--device=cpu", PLAIN]) as model:
        setting = Setting(CPU, SCALE, tmp_path, time.monotonic() + LIMIT_SECONDS, (PLAIN,))
        found = decode.traced(model.session(max_rows=4), setting)
    assert found.detail["file"] == "not kept, too large"
    assert list(tmp_path.iterdir()) == []


def test_the_bytes_of_a_step_are_those_of_the_model_and_its_cache(tmp_path: Path) -> None:
    model = peer(tmp_path)
    weights = sum(p.nbytes for name, p in model.named_parameters() if "norm" not in name)
    cache = DynamicCache()
    with torch.inference_mode():
        model(torch.ones(3, 7, dtype=torch.int64), past_key_values=cache)
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert decode_bytes(TINY, 3 * 7) == weights + stored


def test_the_operations_of_a_prefill_are_those_that_torch_counts(tmp_path: Path) -> None:
    model = peer(tmp_path)
    rows, length = 2, 12
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(torch.ones(rows, length, dtype=torch.int64), logits_to_keep=1)
    # The counter sees whole squares of attention, of which a causal one has length + 1 in 2 * length.
    squares = 4 * TINY.num_layers * TINY.hidden_size * rows * length**2
    causal = squares * (length + 1) / (2 * length)
    assert prefill_flops(TINY, [length] * rows) == counter.get_total_flops() - squares + causal


def test_the_file_is_read_by_the_library_and_by_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    write_weights(path, TINY, CPU)
    describe(tmp_path, TINY)
    found = load_file(path)
    assert {name: tuple(t.shape) for name, t in found.items()} == tensor_shapes(TINY)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert sum(tensor.nbytes for tensor in found.values()) == num_bytes(TINY)
    embedding = found[EMBEDDING].float()
    assert not embedding[0].any()
    assert embedding[1:].std().item() == pytest.approx(0.02, rel=0.05)
    assert (found["model.layers.1.input_layernorm.weight"] == 1).all()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    loaded = dict(model.named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in found.items())


def test_rates_of_kernels_are_beside_the_peaks_of_a_known_device(tmp_path: Path) -> None:
    figures = [figure for figure in figures_of(rates, tmp_path) if figure.kind == goals.RATE]
    names = [figure.name for figure in figures]
    assert len(set(names)) == len(names)
    for mode in rates.MODES:
        assert sum(name.endswith(f", {mode}") for name in names) == len(names) / 2
    weights, rows = 2 * TINY.intermediate_size * TINY.hidden_size, SCALE.batches[1]
    (linear,) = (f for f in figures if f.name == f"linear 128 to 512, {rows} rows, fast")
    assert linear.detail == {
        "bytes": 2 * (weights + rows * (128 + 512)),
        "flops": 2 * rows * weights,
    }
    # 1.675 GB in 1 ms are half of what an H100 reads, and 98.9 TFLOP/s a tenth of what it computes.
    kernel = Figure(
        name="k", kind=goals.RATE, value=1e3, unit="µs", detail={"bytes": 1.675e9, "flops": 98.9e9}
    )
    for gpu, shares in (("NVIDIA H100 80GB HBM3", ("50%", "10%")), ("NVIDIA X1", ("unknown",) * 2)):
        machine = Figure(name="machine", value=8, unit="cores", detail={"gpu": gpu})
        page = results(tmp_path, machine, kernel).text()
        (row,) = (line for line in page.splitlines() if line.startswith("| k "))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells == ["k", "1000 µs", "1675", shares[0], "99", shares[1]]
        assert ("No data sheet of NVIDIA X1 is known" in page) == (shares[0] == "unknown")
