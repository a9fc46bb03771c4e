from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from millrace.simulate.__main__ import main
from millrace.simulate.config import ConfigError, plan_from_args
from millrace.simulate.report import FIGURES
from millrace_router.prediction.cost import COEFFICIENTS

COST = dict.fromkeys(COEFFICIENTS, 0.001)
SIZES = ["--num-blocks", "101", "--block-size", "16", "--max-total-tokens", "900"]


@pytest.fixture
def cost(tmp_path: Path) -> str:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(COST), encoding="utf-8")
    return str(path)


@contextmanager
def serving(answer: object, status: int = 200) -> Iterator[str]:
    """The address of a server that answers every request so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/info?costs=true" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


INFO = {
    "model_id": "x",
    "cost_model": COST,
    "num_blocks": 101,
    "block_size": 16,
    "max_total_tokens": 900,
    "max_input_tokens": 500,
    "max_batch_prefill_tokens": 777,
    "max_batch_size": None,
    "max_concurrent_requests": 33,
    "kv_reservation": "full",
}


def test_settings_come_from_the_server_and_flags_change_them() -> None:
    with serving(INFO) as url:
        plan = plan_from_args(
            ["--server", url + "/", "--rate", "2", "--max-batch-prefill-tokens", "600"]
        )
    (simulation,) = plan.simulations
    deployment = simulation.deployment
    assert deployment.cost_model == COST
    assert (deployment.num_blocks, deployment.block_size) == (101, 16)
    assert deployment.prefill_tokens == 600
    assert deployment.longest_prompt == 500
    assert deployment.kv_reservation == "full"
    assert deployment.max_batch_size is None
    assert simulation.workload.rate == 2.0


def test_a_sweep_makes_a_simulation_of_each_combination(cost: str) -> None:
    sweeps = ["--sweep", "rate=1,2", "--sweep", "kv-reservation=grow,full"]
    flags = ["--requests", "5", "--replicas", "4", "--processes", "2"]
    plan = plan_from_args(["--cost", cost, *SIZES, *flags, *sweeps])
    points = [(s.workload.rate, s.deployment.kv_reservation) for s in plan.simulations]
    assert points == [(1.0, "grow"), (1.0, "full"), (2.0, "grow"), (2.0, "full")]
    assert {simulation.replicas for simulation in plan.simulations} == {4}
    assert plan.processes == 2


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "give one of --trace, --rate and --clients"),
        (["--rate", "x"], "--rate: Input should be a valid number"),
        (["--rate", "1", "--clients", "2"], "give one of"),
        (["--rate", "1", "--max-batch-size", "2.5"], "--max-batch-size: "),
        (["--rate", "1", "--prompt-tokens", "long"], "--prompt-tokens: 'long' is not a length"),
        (["--rate", "1", "--kv-reservation", "half"], "--kv-reservation: "),
        (["--rate", "1", "--num-blocks", "3"], "max_total_tokens is beyond the KV blocks"),
        (["--rate", "1", "--processes", "0"], "--processes: "),
        (["--rate", "1", "--colour"], "unrecognized arguments: --colour"),
        (["--rate", "1", "--sweep", "colour=1"], "there is no flag --colour to sweep"),
        (["--rate", "1", "--sweep", "rate"], "'rate' is not a sweep: use FLAG=VALUE,VALUE"),
        (["--sweep", "rate=1,"], "is not a sweep"),
        (["--rate", "1", "--sweep", "max-batch-size=1,x"], "--max-batch-size: "),
        (["--sweep", "rate=1", "--sweep", "seed=1", "--sweep", "processes=1"], "two flags at most"),
        (["--rate", "1", "--replicas", "0"], "--replicas: "),
        (["--rate", "1", "--speedup", "2"], "--speedup goes with --trace"),
        (["--rate", "1", "--plot", "x.svg"], "--plot draws figures over a --sweep"),
    ],
)
def test_bad_flags_are_named(cost: str, flags: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_from_args(["--cost", cost, *SIZES, *flags])
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 1}', '{"cost_model": {}}'])
def test_a_file_without_costs_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="cost"):
        plan_from_args(["--cost", str(path), *SIZES, "--rate", "1"])


def test_images_need_the_cost_of_a_tile(cost: str, tmp_path: Path) -> None:
    flags = ["--clients=1", "--image-share=0.5", "--cost"]
    with pytest.raises(ConfigError, match="--image-share: the cost model has no `tile`"):
        plan_from_args([*SIZES, *flags, cost])
    other = tmp_path / "other.json"
    other.write_text(json.dumps(COST | {"tile": 0.5}))
    (simulation,) = plan_from_args([*SIZES, *flags, str(other)]).simulations
    assert simulation.deployment.reads_images


def test_a_server_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="'localhost:3000' is not an http:// or https:// address"):
        plan_from_args(["--server", "localhost:3000", "--rate", "1"])
    with serving({"model_id": "x"}) as url, pytest.raises(ConfigError, match="shows no cost_model"):
        plan_from_args(["--server", url, "--rate", "1"])
    with serving(INFO, status=500) as url, pytest.raises(ConfigError, match="500"):
        plan_from_args(["--server", url, "--rate", "1"])
    with pytest.raises(ConfigError, match=r"no server at http://127\.0\.0\.1:1: nothing"):
        plan_from_args(["--server", "http://127.0.0.1:1", "--rate", "1"])


SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(dict.fromkeys(COEFFICIENTS, 0.001)), encoding="utf-8")
    sizes = ["--num-blocks", "101", "--block-size", "16", "--max-total-tokens", "900"]
    return ["--cost", str(path), *sizes, "--rate", "5", "--requests", "20", "--processes", "1"]


def rows(output: str) -> dict[str, list[str]]:
    """The table's columns behind each title, which is set off by two spaces."""
    result = {}
    for line in output.splitlines():
        title, *cells = [part.strip() for part in line.split("  ") if part.strip()]
        result[title] = cells
    return result


def test_a_sweep_is_a_column_for_each_point_and_reasons_come_below(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--burst-size", "20", "--sweep", "max-concurrent-requests=8,20"]) == 0
    table = rows(capsys.readouterr().out)
    assert table["max-concurrent-requests"] == ["8", "20"]
    assert table["finished"] == ["8", "20"]
    assert table["overloaded"] == ["12", "0"]


def test_results_are_written_as_json_and_plot_and_the_deployment_can_be_used_again(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot, results, saved = (tmp_path / name for name in ("p.svg", "r.json", "c.json"))
    sweeps = ["--sweep", "max-batch-size=1,2,4", "--sweep", "kv-reservation=grow,full"]
    files = ["--plot", str(plot), "--json", str(results), "--save-config", str(saved)]
    assert main([*flags, *sweeps, *files]) == 0
    first = capsys.readouterr().out
    points = json.loads(results.read_text(encoding="utf-8"))
    assert [point["point"]["max-batch-size"] for point in points] == ["1", "1", "2", "2", "4", "4"]
    assert all(point["finished"] == 20.0 for point in points)
    assert {figure.name for figure in FIGURES} < points[0].keys()
    root = ET.fromstring(plot.read_text(encoding="utf-8"))
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert {figure.title for figure in FIGURES} < set(words)
    assert words.count("kv-reservation full") == 1
    assert len(list(root.iter(f"{SVG}polyline"))) == 2 * len(FIGURES)
    assert len(list(root.iter(f"{SVG}circle"))) == 6 * len(FIGURES)
    again = ["--cost", str(saved), *flags[flags.index("--rate") :], *sweeps]
    assert main(again) == 0
    assert capsys.readouterr().out == first


def test_bad_input_is_one_line_and_exit_2(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrived_at,prompt_tokens,output_tokens\n0,1,x\n", encoding="utf-8")
    without_rate = [flag for flag in flags if flag not in ("--rate", "5")]
    for argv in (
        [*flags, "--colour", "red"],
        [*flags, "--burst-size", "0"],
        [*without_rate, "--trace", str(trace)],
        [*flags, "--json", str(tmp_path / "none" / "r.json")],
    ):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["--help"])
    assert raised.value.code == 0
    assert "millrace simulate --server http://localhost:3000" in capsys.readouterr().out
