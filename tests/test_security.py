"""Data never contains code that runs, and the threat model names existing tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("proto", "router", "shard", "launcher", "package", "deploy")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
PAGE = ROOT / "docs" / "security.md"

RUNNERS = frozenset({"eval", "exec", "compile", "__import__"})
"""Builtins that make text into code."""
UNPICKLERS = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"})
LOADERS = frozenset({"from_pretrained", "from_config"})
"""Methods of transformers' Auto classes, which may run code of a repository."""
OBJECT_COLLECTIVES = re.compile(r"\w*(object_list|gather_object|broadcast_object)\w*")
"""Functions of torch.distributed that pickle."""
ALLOWED = {
    # Imported for the errors of torch's restricted unpickler; nothing is read with it.
    ("shard/millrace_shard/commands/convert.py", "imports pickle"),
}


def dangers(tree: ast.AST) -> Iterator[str]:
    """Parts of a module that could run data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"imports {n.name}" for n in node.names if _root(n.name) in UNPICKLERS)
        elif isinstance(node, ast.ImportFrom) and _root(node.module or "") in UNPICKLERS:
            yield f"imports from {node.module}"
        elif isinstance(node, ast.Call):
            yield from _dangers_of_call(node)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in UNPICKLERS:
            yield from () if node.attr == "UnpicklingError" else (f"uses {ast.unparse(node)}",)


def _dangers_of_call(call: ast.Call) -> Iterator[str]:
    called = ast.unparse(call.func)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if called in RUNNERS or OBJECT_COLLECTIVES.fullmatch(_leaf(called)):
        yield f"calls {called}"
    if called == "torch.load" and not _is(keywords.get("weights_only"), value=True):
        yield "calls torch.load without weights_only"
    if "trust_remote_code" in keywords and not _is(keywords["trust_remote_code"], value=False):
        # The flag is declared and forwarded as a field, and is no argument of a loader.
        yield f"passes trust_remote_code to {called}"
    if not _is(keywords.get("shell"), value=False) and "shell" in keywords:
        yield f"calls {called} with a shell"
    if called in {"os.system", "os.popen", "yaml.load", "np.load", "numpy.load"}:
        yield f"calls {called}"
    owner, _, method = called.rpartition(".")
    is_of_transformers = _leaf(owner).startswith("Auto") and method in LOADERS
    if is_of_transformers and not _is(keywords.get("trust_remote_code"), value=False):
        yield f"calls {called} without trust_remote_code=False"


def _root(module: str) -> str:
    return module.partition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _is(node: ast.expr | None, *, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_nothing_that_is_read_is_run() -> None:
    found = {
        (str(path.relative_to(ROOT)), danger)
        for path in SOURCES
        for danger in dangers(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert len(SOURCES) > 100
    assert found == ALLOWED


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.nn, dill.detect",
        "pickle.loads(x)",
        "eval(x)",
        "exec(x)",
        "torch.load(x)",
        "torch.load(x, weights_only=flag)",
        "AutoConfig.from_pretrained(x)",
        "transformers.AutoModel.from_config(x)",
        "AutoConfig.from_pretrained(x, trust_remote_code=config.trust_remote_code)",
        "load(x, trust_remote_code=True)",
        "dist.all_gather_object(a, b)",
        "torch.distributed.broadcast_object_list(a)",
        "subprocess.run(x, shell=True)",
        "os.system(x)",
    ],
)
def test_each_danger_would_be_seen(code: str) -> None:
    assert list(dangers(ast.parse(code)))


def test_model_eval_and_safe_loads_are_no_danger() -> None:
    code = (
        "model.eval(); re.compile(x); torch.load(x, weights_only=True); f(trust_remote_code=False)"
    )
    assert list(dangers(ast.parse(code))) == []


NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
BOUNDARIES = (
    "Client to router",
    "Operator to router",
    "Router to shard",
    "Launcher to children",
    "Model files",
    "Downloads",
    "Adapters",
    "Disk",
    "Logs",
    "Dependencies",
)


def test_the_threat_model_names_tests_that_exist() -> None:
    page = PAGE.read_text(encoding="utf-8")
    named = NAMED.findall(page)
    # The pattern must match every name of a test.
    assert len(named) == page.count("::test_") > 30
    for path, name in named:
        functions = {
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert name in functions, f"{path} has no {name}"


def test_each_boundary_of_the_threat_model_names_a_test() -> None:
    parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert tuple(parts[1::2]) == BOUNDARIES
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        assert NAMED.search(text), f"{title} is enforced by no test"
