"""Files, functions and folders stay small, and public classes have docstrings."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from millrace_testing.project import ROOT, project_files

LONGEST_FILE = 300
LONGEST_TEST_FILE = 700
"""A file of tests is a list of functions that do not know of each other, so it may be longer."""
LONGEST_FUNCTION = 50
LARGEST_FOLDER = 16

TABLES = {
    "demo/concepts.py": "the demo model's facts about terms",
    "demo/interface.py": "the demo model's facts about flags, routes and metrics",
    "router/millrace_router/errors.py": "each error of the router with its status and text",
}
"""Files that may be longer, since they are one table."""
KERNELS = {
    "shard/millrace_shard/kernels/cuda/triton_attention.py: attend_tiles",
    "shard/millrace_shard/kernels/cuda/triton_attention.py: attend_spans",
    "shard/millrace_shard/kernels/cuda/triton_quantized.py: _multiply_codes",
    "shard/millrace_shard/kernels/cuda/triton_rope.py: _rope_store",
    "shard/millrace_shard/kernels/cuda/triton_softmax.py: visit",
}
"""Functions that may be longer: Triton compiles each as one program, and a call would not split it."""

SOURCES = {name: (ROOT / name).read_text() for name in project_files() if name.endswith(".py")}


def long_files(texts: dict[str, str]) -> set[str]:
    """Names of files with too many lines."""
    return {
        name
        for name, text in texts.items()
        if len(text.splitlines())
        > (LONGEST_TEST_FILE if name.startswith("tests/") else LONGEST_FILE)
    }


def long_functions(texts: dict[str, str]) -> set[str]:
    """`file: function` of functions with too many lines."""
    found = set()
    for name, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= LONGEST_FUNCTION:
                    found.add(f"{name}: {node.name}")
    return found


def full_folders(names: Iterable[str]) -> set[str]:
    """Folders with too many Python files of their own."""
    counts = Counter(str(Path(name).parent) for name in names)
    return {folder for folder, count in counts.items() if count > LARGEST_FOLDER}


def undescribed_classes(texts: dict[str, str]) -> set[str]:
    """`file: class` of public classes without a docstring, tests aside."""
    return {
        f"{name}: {node.name}"
        for name, text in texts.items()
        if not name.startswith("tests/")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    }


def test_files_are_short() -> None:
    assert long_files(SOURCES) == TABLES.keys()


def test_functions_are_short() -> None:
    assert long_functions(SOURCES) == KERNELS


def test_folders_are_small() -> None:
    assert full_folders(SOURCES) == set()


def test_public_classes_say_what_they_are() -> None:
    assert undescribed_classes(SOURCES) == set()


def test_what_is_wrong_is_found() -> None:
    function = "def f() -> None:\n" + "    pass\n" * LONGEST_FUNCTION
    assert long_functions({"a.py": function}) == {"a.py: f"}
    assert long_functions({"a.py": function.removesuffix("    pass\n")}) == set()
    line = "x = 1\n"
    assert long_files({"a.py": line * 301, "b.py": line * 300}) == {"a.py"}
    assert long_files({"tests/a.py": line * 701, "tests/b.py": line * 700}) == {"tests/a.py"}
    names = [f"room/{number}.py" for number in range(LARGEST_FOLDER)]
    assert full_folders(names) == set()
    assert full_folders([*names, "room/__init__.py"]) == {"room"}
    text = 'class A:\n    x = 1\nclass _B:\n    x = 1\nclass C:\n    """Says."""\n'
    assert undescribed_classes({"a.py": text, "tests/b.py": text}) == {"a.py: A"}
