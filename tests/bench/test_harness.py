"""Starting our server for a benchmark: what becomes of one that cannot start."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from bench.harness.checkpoints import (
    END_TOKEN,
    Shape,
    build_tokenizer,
    write_checkpoint,
)
from bench.harness.quiet import Quiet, wait_until_quiet
from bench.harness.record import Record
from bench.harness.repeats import Repeated, Sample, ratio_text
from bench.harness.scrape import parse
from bench.harness.server import ServerError, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from millrace.load.levels import prompt
from millrace_router.telemetry.instruments import render
from millrace_router.telemetry.metrics import Metrics


def test_a_launcher_that_ends_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "out" / "launcher.log"
    with (
        pytest.raises(ServerError, match=r"the launcher ended with 2:[\s\S]*--no-such-flag"),
        serving(tmp_path, log=log, flags=["--no-such-flag"]),
    ):
        pytest.fail("it was taken for healthy")


VOCAB_SIZE = 18_600
TINY = Shape(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=VOCAB_SIZE,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, TINY, seed=3)
    return folder


@pytest.mark.parametrize(("size", "letters"), [(959, 2), (18_534, 2), (18_535, 3), (VOCAB_SIZE, 3)])
def test_the_vocabulary_has_the_requested_size_and_no_gap(size: int, letters: int) -> None:
    tokenizer = build_tokenizer(size)
    assert tokenizer.get_vocab_size() == size
    assert sorted(tokenizer.get_vocab().values()) == list(range(size))
    words = [" " + "z" * length for length in range(1, 4)]
    assert [len(tokenizer.encode(word).ids) == 1 for word in words] == [
        length <= letters for length in range(1, 4)
    ]
    assert tokenizer.token_to_id(END_TOKEN) == 0


def test_transformers_loads_it_and_never_picks_the_end_token(checkpoint: Path) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(prompt(16, seed="b"), return_tensors="pt").input_ids
    tokens = model.generate(ids, max_new_tokens=24, do_sample=False)
    assert tokens.shape == (1, 40)
    assert 0 not in tokens[0, 16:].tolist()


QUIET = Quiet(idle_seconds=2.0, patience_seconds=10.0)


class FakeMachine:
    """Others use what the list says, one entry for each look."""

    def __init__(self, loads: Iterable[float]) -> None:
        self.now = 0.0
        self._loads = iter(loads)

    def measure(self, seconds: float) -> float:
        self.now += seconds
        return next(self._loads)

    def clock(self) -> float:
        return self.now


def test_it_waits_for_the_first_quiet_stretch() -> None:
    machine = FakeMachine([1.3, 0.1, 0.02, 0.9])
    assert wait_until_quiet(QUIET, measure=machine.measure, clock=machine.clock)
    assert machine.now == 6.0


FACTS = {
    "cpu": "a & b",
    "cores": "2",
    "memory": "24 GiB",
    "commit": "abc",
    "torch": "2",
    "transformers": "5",
    "python": "3.11",
}


@pytest.fixture
def record() -> Record:
    return Record(
        bench="startup",
        title="Start and memory, demo",
        command="python -m bench.startup --model demo",
        figures={"ready_seconds": [4.1]},
        other_cores=0.05,
        finished_at=datetime(2026, 11, 21, 6, 30, tzinfo=UTC),
        machine=FACTS,
    )


def test_a_run_is_one_file_with_title_date_machine_and_command(
    record: Record, tmp_path: Path
) -> None:
    path = record.write(tmp_path / "results")
    assert path.name == "2026-11-21-0630-startup-start-and-memory-demo.json"
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert json.loads(path.read_text()) == {
        "bench": "startup",
        "title": "Start and memory, demo",
        "date": "2026-11-21T06:30+00:00",
        "commit": "abc",
        "command": "python -m bench.startup --model demo",
        "machine": {name: fact for name, fact in FACTS.items() if name != "commit"},
        "other_cores": 0.05,
        "figures": {"ready_seconds": [4.1]},
    }


def repeated(samples: list[tuple[float, float]]) -> Repeated:
    """From (value, cores of others) pairs."""
    return Repeated(tuple(Sample(*pair) for pair in samples))


def test_the_median_is_of_the_undisturbed_ones() -> None:
    found = repeated([(10.0, 0.0), (12.0, 0.05), (99.0, 0.4), (14.0, 0.1)])
    assert found.median == 12.0
    assert found.text == "12.0"
    assert found.all_text() == "10.0 12.0 ~99.0 14.0"


def test_where_all_were_disturbed_the_median_is_marked() -> None:
    found = repeated([(10.0, 0.5), (20.0, 0.2)])
    assert (found.median, found.is_clean, found.text) == (15.0, False, "~15.0")


def test_a_ratio_is_marked_where_either_side_was_disturbed() -> None:
    clean, disturbed = repeated([(30.0, 0.0)]), repeated([(20.0, 0.3)])
    assert ratio_text(clean, clean) == "1.00"
    assert ratio_text(clean, disturbed) == "~1.50"
    assert ratio_text(clean, None) == ""


def exposed() -> str:
    metrics = Metrics(max_input_tokens=100, max_total_tokens=200)
    metrics.prefill_tokens.inc(1234)
    metrics.batch_current_size.set(7)
    metrics.prediction_error.labels(prediction="first_token", percentile="90").set(0.25)
    metrics.time_to_first_token_seconds.observe(0.5)
    return render(metrics.registry).decode()


def test_metrics_of_the_router_are_parsed_under_the_names_that_parts_use() -> None:
    samples = parse(exposed())
    assert samples["millrace_prefill_tokens_total"] == 1234
    assert samples["tgi_batch_current_size"] == 7
    series = 'millrace_prediction_error_seconds{prediction="first_token",percentile="90"}'
    assert samples[series] == 0.25
    assert samples["millrace_time_to_first_token_seconds_count"] == 1
