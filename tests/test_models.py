"""The tables of docs/models.md have every model and format that starts, each with a test that exists."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from tools import model_table

from millrace_shard.config import ShardConfig
from millrace_shard.models.families.registry import FAMILIES, SAME_TYPES
from millrace_shard.models.transformers_backend.supported import SUPPORTED as CLASSES
from millrace_shard.vision.registry import FAMILIES as ENCODERS
from millrace_shard.weights.quantized.quantization_config import SUPPORTED as FORMATS
from millrace_testing.project import ROOT, project_files

PAGE = (ROOT / "docs" / "models.md").read_text()
TESTS = {path.rpartition("/")[2]: path for path in project_files() if "/test_" in path}


def rows(heading: str) -> list[list[str]]:
    """The cells of the rows of the first table below a heading."""
    _, found, text = PAGE.partition(f"# {heading}\n")
    assert found, heading
    first = re.search(r"(?:^\|.*\|\n)+", text.partition("\n#")[0], re.MULTILINE)
    assert first, heading
    lines = first[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


MODELS, FORMAT_ROWS = rows("Models that start"), rows("Formats that start")
OF_TGI = rows("The model types of TGI")


def test_every_model_is_in_the_table_once() -> None:
    cells = [types for _, types, *_ in MODELS if not types.startswith("with ")]
    assert sorted(", ".join(cells).split(", ")) == sorted((*FAMILIES, *ENCODERS, *CLASSES))


def test_the_table_of_tgi_has_39_types_and_what_the_server_makes_of_each() -> None:
    types = [name for cell, *_ in OF_TGI for name in cell.split(", ")]
    assert len(types) == len(set(types)) == 39
    served = {*FAMILIES, *SAME_TYPES, *CLASSES, *ENCODERS}
    for cell, outcome, _ in OF_TGI:
        names = set(cell.split(", "))
        if outcome == "own decoder":
            assert names <= FAMILIES.keys()
        elif outcome == "the class of `transformers`":
            assert names <= set(CLASSES)
        elif "refused" in outcome:
            assert not names & served


def test_every_format_is_in_the_table() -> None:
    named = re.findall("`([^`]+)`", " ".join(row[0] for row in FORMAT_ROWS))
    assert sorted(named) == sorted(FORMATS)


@pytest.mark.parametrize(
    ("heading", "field"), [("`--quantize`", "quantize"), ("KV cache", "kv_cache_dtype")]
)
def test_every_value_of_a_flag_is_in_its_table(heading: str, field: str) -> None:
    values = re.findall("'([^']+)'", str(ShardConfig.model_fields[field].annotation))
    named = [name for row in rows(heading) for name in re.findall("`([^`]+)`", row[0])]
    assert sorted(named) == sorted(values)


@pytest.mark.parametrize(
    "row", [*MODELS, *OF_TGI, *FORMAT_ROWS], ids=lambda row: row[0].split(",")[0]
)
def test_every_row_names_a_test(row: list[str]) -> None:
    assert re.fullmatch(r"`(test_\w+\.py)`", row[-1]), row[-1]
    assert row[-1].strip("`") in TESTS


def test_the_table_of_tests_is_what_their_parameters_name() -> None:
    """`python -m tools.model_table` writes it."""
    subprocess.run([sys.executable, "-m", "tools.model_table", "--check"], cwd=ROOT, check=True)


def test_a_type_has_the_columns_of_tests_with_its_name() -> None:
    logits, lora = (model_table.COLUMNS[name][0] for name in ("logits", "LoRA"))
    ids = [f"{logits}[llama]", f"{lora}[llama-cpu]", f"{lora}[llamas]", f"{logits}s[mpt]", "x[opt]"]
    assert model_table.tested(ids) == {"llama": {"logits", "LoRA"}, "mpt": {"logits"}}
