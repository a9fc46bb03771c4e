from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from millrace.simulate.__main__ import main
from millrace.simulate.report import FIGURES
from millrace_router.prediction.cost import COEFFICIENTS

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


def test_one_point_is_a_column_of_figures(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 0
    table = rows(capsys.readouterr().out)
    assert list(table) == [figure.title for figure in FIGURES]
    assert table["finished"] == ["20"]
    assert all(len(cells) == 1 for cells in table.values())


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
    assert "millrace-simulate --server http://localhost:3000" in capsys.readouterr().out
