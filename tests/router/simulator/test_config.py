from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from millrace_router.prediction.cost import COEFFICIENTS
from millrace_router.simulator.cells.failures import Failure
from millrace_router.simulator.config import ConfigError, plan_from_args

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


def test_a_server_says_how_it_is_set_and_flags_change_it() -> None:
    with serving(INFO) as url:
        plan = plan_from_args(
            ["--server", url + "/", "--rate", "2", "--max-batch-prefill-tokens", "600"]
        )
    (fleet,) = plan.fleets
    deployment = fleet.deployment
    assert deployment.cost_model == COST
    assert (deployment.num_blocks, deployment.block_size) == (101, 16)
    assert deployment.prefill_tokens == 600
    assert deployment.longest_prompt == 500
    assert deployment.kv_reservation == "full"
    assert deployment.max_batch_size is None
    assert fleet.workload.rate == 2.0


def test_what_was_saved_can_be_read(cost: str, tmp_path: Path) -> None:
    flags = ["--kv-reservation", "full", "--target-inter-token-latency", "40", "--rate", "1"]
    plan = plan_from_args(["--cost", cost, *SIZES, *flags])
    saved = tmp_path / "saved.json"
    saved.write_text(plan.deployment.model_dump_json(), encoding="utf-8")
    again = plan_from_args(["--cost", str(saved), "--rate", "1"])
    assert again.deployment == plan.deployment
    assert again.deployment.target_inter_token_latency == 40.0


def test_a_sweep_makes_a_fleet_of_each_combination(cost: str) -> None:
    scope = ["--replicas", "4", "--sample", "2"]
    sweeps = ["--sweep", "rate=1,2", "--sweep", "kv-reservation=grow,full"]
    plan = plan_from_args(["--cost", cost, *SIZES, "--requests", "5", *scope, *sweeps])
    points = [(f.workload.rate, f.deployment.kv_reservation) for f in plan.fleets]
    assert points == [(1.0, "grow"), (1.0, "full"), (2.0, "grow"), (2.0, "full")]
    assert {(fleet.replicas, fleet.sample) for fleet in plan.fleets} == {(4, 2)}


def test_cells_and_gateways_have_flags(cost: str) -> None:
    flags = ["--replicas", "10000", "--cell-size", "256", "--processes", "2", "--gateways", "3"]
    flags += ["--routing", "kv", "--balance-factor", "1.5", "--fail", "60:3:120"]
    plan = plan_from_args(["--cost", cost, *SIZES, "--rate", "1", *flags])
    (fleet,) = plan.fleets
    assert plan.processes == 2
    assert (fleet.replicas, fleet.cell_size, fleet.gateways) == (10_000, 256, 3)
    assert (fleet.routing, fleet.balance_factor) == ("kv", 1.5)
    assert fleet.failures == (Failure(60.0, 3, 120.0),)
    assert fleet.num_simulated_cells == fleet.division.num_cells == 40


def test_sizes_themselves_can_be_swept(cost: str) -> None:
    sweeps = ["--sweep", "num-blocks=100,200", "--sweep", "replicas=1,2"]
    plan = plan_from_args(["--cost", cost, *SIZES[2:], "--clients", "3", *sweeps])
    assert [(f.deployment.num_blocks, f.replicas) for f in plan.fleets] == [
        (100, 1),
        (100, 2),
        (200, 1),
        (200, 2),
    ]
    assert {fleet.sample for fleet in plan.fleets} == {1, 2}


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "give one of --trace, --rate and --clients"),
        (["--rate", "x"], "--rate: Input should be a valid number"),
        (["--rate", "1", "--clients", "2"], "give one of"),
        (["--rate", "1", "--max-batch-size", "2.5"], "--max-batch-size: "),
        (["--rate", "1", "--prompt-tokens", "long"], "--prompt-tokens: 'long' is no length"),
        (["--rate", "1", "--kv-reservation", "half"], "--kv-reservation: "),
        (["--rate", "1", "--num-blocks", "3"], "max_total_tokens is beyond the KV blocks"),
        (["--rate", "1", "--processes", "0"], "--processes: "),
        (["--rate", "1", "--colour"], "unrecognized arguments: --colour"),
        (["--rate", "1", "--sweep", "colour=1"], "there is no flag --colour to sweep"),
        (["--rate", "1", "--sweep", "rate"], "'rate' is no sweep: give FLAG=VALUE,VALUE"),
        (["--sweep", "rate=1,"], "is no sweep"),
        (["--rate", "1", "--sweep", "max-batch-size=1,x"], "--max-batch-size: "),
        (["--sweep", "rate=1", "--sweep", "seed=1", "--sweep", "processes=1"], "two flags at most"),
        (["--rate", "1", "--fail", "60:3"], "--fail: '60:3' is no failure: give AT:COUNT:FOR"),
        (["--rate", "1", "--fail", "60:3:120"], "--fail: there are not so many replicas"),
        (["--rate", "1", "--balance-factor", "0.9"], "--balance-factor: "),
        (["--rate", "1", "--routing", "fastest"], "--routing: "),
        (["--rate", "1", "--copies", "2"], "--copies goes with --trace"),
        (["--rate", "1", "--plot", "x.svg"], "--plot draws figures over a --sweep"),
    ],
)
def test_bad_flags_are_named(cost: str, flags: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_from_args(["--cost", cost, *SIZES, *flags])
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_sizes_are_named(cost: str) -> None:
    with pytest.raises(ConfigError, match="--num-blocks: is missing"):
        plan_from_args(["--cost", cost, "--rate", "1"])


def test_costs_have_to_come_from_somewhere() -> None:
    with pytest.raises(ConfigError, match="--server or --cost says what a step costs"):
        plan_from_args(["--rate", "1"])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 1}', '{"cost_model": {}}'])
def test_a_file_without_costs_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="cost"):
        plan_from_args(["--cost", str(path), *SIZES, "--rate", "1"])


def test_a_server_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="'localhost:3000' is no http:// or https:// address"):
        plan_from_args(["--server", "localhost:3000", "--rate", "1"])
    with serving({"model_id": "x"}) as url, pytest.raises(ConfigError, match="shows no cost_model"):
        plan_from_args(["--server", url, "--rate", "1"])
    with serving(INFO, status=500) as url, pytest.raises(ConfigError, match="500"):
        plan_from_args(["--server", url, "--rate", "1"])
    with pytest.raises(ConfigError, match=r"cannot read http://127\.0\.0\.1:1/info"):
        plan_from_args(["--server", "http://127.0.0.1:1", "--rate", "1"])


def test_a_server_that_knows_nothing_yet_says_so() -> None:
    complaint = "the server has not served enough to know"
    with serving(INFO | {"cost_model": {}}) as url, pytest.raises(ConfigError, match=complaint):
        plan_from_args(["--server", url, "--rate", "1"])
