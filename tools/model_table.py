"""`python -m tools.model_table`: write into docs/models.md which types of models have which tests.

The table stands between `<!-- tested -->` and `<!-- /tested -->`; types with the same tests share a row. `--check` writes
nothing; exit code 1 where the page has another table.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from millrace_shard.models.families.registry import FAMILIES
from millrace_shard.models.transformers_backend.supported import SUPPORTED
from millrace_shard.vision.registry import FAMILIES as ENCODERS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- tested -->\n", "<!-- /tested -->"
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "logits": (
        "tests/shard/model_runner/test_pooled_rows.py::test_states_and_logits_match_transformers",
        "tests/shard/vision/test_vision.py::test_logits_after_images_are_those_of_transformers",
        "tests/shard/vision/test_qwen_vl.py::test_logits_after_images_and_later_ones_are_those_of_transformers",
        "tests/shard/vision/test_vision.py::test_a_grid_is_packed_as_in_transformers",
    ),
    "bits": (
        "tests/shard/invariance/test_invariance_models.py::test_bits_depend_only_on_the_sequence",
        "tests/shard/vision/test_vision.py::test_bits_do_not_depend_on",
        "tests/shard/vision/test_vision.py::test_bits_of_a_grid_do_not_depend_on",
        "tests/shard/vision/test_qwen_vl.py::test_bits_do_not_depend_on",
    ),
    "GGUF": (
        "tests/shard/models/test_gguf_models.py::test_logits_of_all_families_match_transformers",
        "tests/shard/vision/test_mmproj.py::test_features_and_logits_are_those_of_the_checkpoint",
    ),
    "ranks": (
        "tests/shard/device/test_process_group.py::test_two_ranks_generate_the_tokens_of_transformers",
        "tests/shard/models/test_transformers_ranks.py::",
        "tests/shard/vision/test_vision.py::test_two_ranks_have_the_features_of_one",
        "tests/shard/vision/test_qwen_vl.py::test_two_ranks_answer_as_one",
    ),
    "LoRA": ("tests/shard/adapters/test_peft.py::test_adapters_of_all_projections_match_peft",),
    "MTP": (
        "tests/shard/speculation/test_hidden_state_heads.py::test_mtp_layers_draft_as_in_transformers",
        "tests/shard/speculation/test_hidden_state_heads.py::test_mtp_layers_of_recurrent_models_draft",
    ),
}
"""By column the beginnings of the tests whose parameters name types."""


def collected() -> list[str]:
    """The ids of all tests in the files of the table, the long ones among them."""
    files = sorted({test.partition("::")[0] for tests in COLUMNS.values() for test in tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "long or not long"]
    command += ["-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return [line for line in done.stdout.splitlines() if "[" in line]


def tested(ids: Iterable[str]) -> dict[str, set[str]]:
    """The columns of each type, by the parameters of tests."""
    types = {*FAMILIES, *SUPPORTED, *ENCODERS}
    columns: dict[str, set[str]] = defaultdict(set)
    for id_ in ids:
        names = types.intersection(re.split(r"[-\[\],]", id_.partition("[")[2]))
        for column, tests in COLUMNS.items():
            if id_.startswith(tests):
                for name in names:
                    columns[name].add(column)
    return columns


def table(columns: Mapping[str, set[str]]) -> str:
    """The lines of the table."""
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for kind, names in (("", FAMILIES), ("", SUPPORTED), ("images", ENCODERS)):
        for name in names:
            has = columns.get(name, set())
            rows[(*("yes" if each in has else "no" for each in COLUMNS), kind or "no")].append(name)
    lines = [
        f"| `model_type` | {' | '.join(COLUMNS)} | images |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    lines += [
        f"| {', '.join(names)} | {' | '.join('yes' if cell == 'images' else cell for cell in cells)} |"
        for cells, names in rows.items()
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} lacks {BEGIN.strip()} or {END}")
    new = table(tested(collected()))
    if arguments.check:
        return int(old != new)
    PAGE.write_text(f"{before}{begin}{new}{end}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
