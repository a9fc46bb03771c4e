"""Files hold one idea, rooms keep their budgets, and texts are in plain English."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

import pytest

from millrace_testing.project import ROOT, project_files

LONGEST_FILE = 500
LONGEST_TEST_FILE = 900
"""A file of tests is a list of functions that do not know of each other, so it may be longer."""
LONGEST_FUNCTION = 50
SHORTEST_FILE = 80
"""A shorter file with one importer in its room belongs into that importer."""
PAGES = (
    *("/families", "/formats", "/kernels/cpu", "/kernels/cuda", "/weights/quantized"),
    *("millrace_router/images", "millrace_shard/vision"),
)
"""Rooms whose files are pages: one for each model family, call format, kernel or weight format."""
PURE = ("scheduler", "prediction", "reasoning", "tool_calls")
"""Rooms of the router that do no I/O, read no clock and never await."""
IMPURE = {"asyncio", "http", "os", "pathlib", "random", "socket", "subprocess", "threading", "time"}
"""Modules of the standard library that such rooms do not import."""
PROCESSES = {"child.py", "guard.py", "grammar_worker.py"}
"""Files that run as processes, as every `__main__.py` does."""
TABLES = {
    "demo/concepts.py": "the demo model's facts about terms",
    "router/millrace_router/errors.py": "each error of the router with its status and text",
}
"""Files that may be longer, since they are one table."""
KERNELS = {
    "shard/millrace_shard/kernels/cuda/triton_attention.py: attend_tiles",
    "shard/millrace_shard/kernels/cuda/triton_attention.py: attend_spans",
    "shard/millrace_shard/kernels/cuda/triton_heads.py: store_latents",
    "shard/millrace_shard/kernels/cuda/triton_latents.py: _visit",
    "shard/millrace_shard/kernels/cuda/triton_latents.py: attend_latent_tiles",
    "shard/millrace_shard/kernels/cuda/triton_latents.py: attend_latent_spans",
    "shard/millrace_shard/kernels/cuda/triton_rope.py: _rope_store",
    "shard/millrace_shard/kernels/cuda/triton_softmax.py: visit",
}
"""Functions that may be longer: Triton compiles each as one program, and a call would not split it."""
PARTS = {
    "proto/millrace_proto": "millrace_proto",
    "router/millrace_router": "millrace_router",
    "shard/millrace_shard": "millrace_shard",
    "launcher/millrace_launcher": "millrace_launcher",
    "package/millrace": "millrace",
    "cluster/millrace_ray": "millrace_ray",
}
"""Import packages of the product by folder."""
BUDGETS = ROOT / "tests" / "budgets.txt"
CONSTRUCTIONS = {
    "`is not a folder`": r"\b(?:is|are|was|were|be|has|have|had) no "
    r"(?!longer\b|more\b|one\b|effect\b|doubt\b|different\b|other\b|such\b)[a-z]+ ?"
    r"(?:$|[.,;:)]|and\b|that\b|which\b|but\b)",
    "the possessive, or the noun again": r"\b(?:that|those) of (?!course\b)",
    "`next to`, `with`, `in addition to`": r"\bbeside\b",
    "`shows`, `reports`, `requires`": r"\b(?:told|tells)\b",
    "`its own`": r"\bof (?:its|their) own\b(?! accord)",
    "`no one`, `anyone who`, `so that not`": r"\b(?:nobody|whoever|lest|thereof)\b",
}
"""Constructions with another language's grammar, by what to write."""

SOURCES = {name: (ROOT / name).read_text() for name in project_files() if name.endswith(".py")}
PRODUCT = {
    name: text
    for name, text in SOURCES.items()
    if name.startswith(tuple(f"{one}/" for one in PARTS))
}


def long_files(texts: Mapping[str, str]) -> set[str]:
    """Names of files with too many lines."""
    return {
        name
        for name, text in texts.items()
        if len(text.splitlines())
        > (LONGEST_TEST_FILE if name.startswith("tests/") else LONGEST_FILE)
    }


def long_functions(texts: Mapping[str, str]) -> set[str]:
    """`file: function` of functions with too many lines."""
    functions = set()
    for name, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= LONGEST_FUNCTION:
                    functions.add(f"{name}: {node.name}")
    return functions


def undescribed_classes(texts: Mapping[str, str]) -> set[str]:
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


def module_of(name: str) -> str:
    """Dotted name of a product file."""
    folder = next(one for one in PARTS if name.startswith(f"{one}/"))
    return PARTS[folder] + name.removeprefix(folder).removesuffix(".py").replace("/", ".")


def imported_names(text: str) -> Iterator[str]:
    """Dotted names that a file imports: modules, and what it takes from them."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names)


def importers(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Product files that import each product file."""
    files = {module_of(name): name for name in texts}
    users: dict[str, set[str]] = defaultdict(set)
    for name, text in texts.items():
        for module in imported_names(text):
            if module in files:
                users[files[module]].add(name)
    return users


def room_imports(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """What the files of each room import: rooms and top modules of their package, and other packages, by short name."""
    files = {module_of(name).removesuffix(".__init__"): name for name in texts}
    imports: dict[str, set[str]] = defaultdict(set)
    for name, text in texts.items():
        package, *room = module_of(name).split(".")[:-1]
        if not room:
            continue
        short_names = imports[str(PurePosixPath(name).parent)]
        for target in imported_names(text):
            if target not in files:
                continue
            other, *module = target.split(".")
            if not files[target].endswith("/__init__.py") and len(module) > 1:
                module.pop()
            if other != package:
                short_names.add(other)
            elif module and module != room:
                short_names.add(".".join(module))
    return imports


def stated_imports(text: str) -> set[str]:
    """The names after `Imports:` in the docstring of a room."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    match = re.search(r"^Imports: ([^;]*?)\.$", docstring, re.MULTILINE | re.DOTALL)
    return set(re.split(r",\s+", match[1])) if match else set()


def fragments(texts: Mapping[str, str]) -> set[str]:
    """Short files that one other file of their room imports, and nothing else."""
    short = set()
    users = importers(texts)
    for name, text in texts.items():
        path = PurePosixPath(name)
        room = str(path.parent)
        if path.name.startswith("__") or path.name in PROCESSES or room.endswith(PAGES):
            continue
        rooms = [str(PurePosixPath(user).parent) for user in users[name]]
        if len(text.splitlines()) < SHORTEST_FILE and rooms == [room]:
            short.add(name)
    return short


def room_lines(texts: Mapping[str, str]) -> Counter[str]:
    """Lines of each folder's own Python files."""
    lines: Counter[str] = Counter()
    for name, text in texts.items():
        lines[str(PurePosixPath(name).parent)] += len(text.splitlines())
    return lines


def prose(name: str, text: str) -> Iterator[str]:
    """Sentences of a file: the lines of a page; docstrings, messages and comments of a source."""
    if not name.endswith(".py"):
        yield from text.splitlines()
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from node.value.splitlines()
    yield from re.findall(r"^\s*# .*$", text, re.MULTILINE)


def odd_sentences(texts: Mapping[str, str]) -> list[str]:
    """Lines of prose with one of the constructions, and what to write."""
    return [
        f"{name}: {line.strip()[:120]} (write {advice})"
        for name, text in texts.items()
        for line in prose(name, text)
        for advice, pattern in CONSTRUCTIONS.items()
        if re.search(pattern, line)
    ]


def test_files_hold_at_most_500_lines() -> None:
    assert long_files(SOURCES) == TABLES.keys()


def test_functions_hold_at_most_50_lines() -> None:
    assert long_functions(SOURCES) == KERNELS


def test_short_files_with_one_importer_are_part_of_it() -> None:
    assert sorted(fragments(PRODUCT)) == []


def test_every_room_keeps_its_budget() -> None:
    rows = [line.split() for line in BUDGETS.read_text().splitlines() if line[:1] == " "]
    budgets = {room: int(lines) for lines, room in rows}
    lines = room_lines(PRODUCT)
    assert lines.keys() == budgets.keys()
    over = {room: count for room, count in lines.items() if count > budgets[room]}
    assert over == {}, "remove something, or raise the budget in a change that says why"


def test_every_room_states_what_it_imports() -> None:
    stated = {
        room: stated_imports(PRODUCT[f"{room}/__init__.py"]) for room in room_imports(PRODUCT)
    }
    assert stated == room_imports(PRODUCT)


def impure(texts: Mapping[str, str]) -> set[str]:
    """`file: reason` of files of pure rooms that await or import a module with side effects."""
    reasons = set()
    for name, text in texts.items():
        if not name.startswith(tuple(f"router/millrace_router/{room}/" for room in PURE)):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        if any(isinstance(node, ast.AsyncFunctionDef | ast.Await) for node in nodes):
            reasons.add(f"{name}: await")
        modules = {module.partition(".")[0] for module in imported_names(text)}
        reasons |= {f"{name}: {module}" for module in modules & IMPURE}
    return reasons


def test_pure_rooms_neither_wait_nor_do_io() -> None:
    assert impure(PRODUCT) == set()
    name = "router/millrace_router/scheduler/a.py"
    text = "import time\nasync def f() -> None:\n    pass\n"
    assert impure({name: text}) == {f"{name}: await", f"{name}: time"}


def test_public_classes_have_docstrings() -> None:
    assert undescribed_classes(SOURCES) == set()


def test_product_and_pages_are_in_plain_english() -> None:
    pages = {
        name: (ROOT / name).read_text()
        for name in project_files()
        if name.endswith(".md") and not name.startswith(("CHANGELOG", "bench/results"))
    }
    assert odd_sentences({**PRODUCT, **pages}) == []


def test_each_rule_detects_a_violation() -> None:
    function = "def f() -> None:\n" + "    pass\n" * LONGEST_FUNCTION
    assert long_functions({"a.py": function}) == {"a.py: f"}
    assert long_functions({"a.py": function.removesuffix("    pass\n")}) == set()
    line = "x = 1\n"
    assert long_files({"a.py": line * 501, "b.py": line * 500}) == {"a.py"}
    assert long_files({"tests/a.py": line * 901, "tests/b.py": line * 900}) == {"tests/a.py"}
    text = 'class A:\n    x = 1\nclass _B:\n    x = 1\nclass C:\n    """Says."""\n'
    assert undescribed_classes({"a.py": text, "tests/b.py": text}) == {"a.py: A"}
    room = "router/millrace_router/text"
    user = "from millrace_router.text.a import A\nfrom millrace_router.text.b import B\n"
    texts = {
        f"{room}/a.py": line * 79,
        f"{room}/b.py": line * 80,
        f"{room}/user.py": user,
    }
    assert fragments(texts) == {f"{room}/a.py"}
    assert fragments({**texts, "router/millrace_router/app.py": user}) == set()
    assert room_lines(texts)[room] == 161
    texts[f"{room}/__init__.py"] = '"""Text.\n\nImports: errors,\nserver.\n"""\n'
    texts[f"{room}/user.py"] += "from millrace_router.server.c import C\n"
    texts["router/millrace_router/server/c.py"] = line
    assert room_imports(texts)[room] == {"server"}
    assert stated_imports(texts[f"{room}/__init__.py"]) == {"errors", "server"}


@pytest.mark.parametrize(
    "sentence",
    [
        "x is no folder",
        "the lines are those of the file",
        "an answer beside it",
        "as the flag tells",
        "a process of its own",
        "nobody waits",
    ],
)
def test_accented_sentences_are_refused(sentence: str) -> None:
    assert len(odd_sentences({"docs/a.md": sentence})) == 1
    assert len(odd_sentences({"a.py": f'"""{sentence}"""\n'})) == 1
    assert odd_sentences({"a.py": f"{sentence.rsplit(maxsplit=1)[-1]} = 1\n"}) == []
