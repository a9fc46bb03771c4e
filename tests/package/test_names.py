"""The public names of the package."""

from __future__ import annotations

import ast
import importlib

import pytest

import millrace
from millrace_testing.project import ROOT

NAMES = sorted(set(dir(millrace)) - set(vars(millrace)))


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "package" / "millrace" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there(name: str) -> None:
    found = getattr(millrace, name)
    assert getattr(importlib.import_module(found.__module__), name) is found


def test_no_other_name_is() -> None:
    with pytest.raises(AttributeError, match="'llama'"):
        _ = millrace.llama
