"""Versions on disk: found again by another process, for the same source and server alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from millrace_router.adapters.names.last_versions import FOLDER, LastVersions
from millrace_router.request.adapter import AdapterSource, AdapterVersion
from millrace_testing.adapters.fake_fetcher import version

SOURCE = (AdapterSource.HUB, "org/a", "main", None)
SERVER = ("https://hub", (("q_proj", 8, 8),), 64)


def last(cache: Path, server: object = SERVER, source: object = SOURCE) -> AdapterVersion | None:
    return LastVersions(cache, server=server).get(source, "b")


def test_a_version_outlasts_the_process(tmp_path: Path) -> None:
    assert last(tmp_path) is None
    kept = LastVersions(tmp_path, server=SERVER)
    for weights in ("old", "new"):
        kept.keep(SOURCE, version("a", weights))
        assert last(tmp_path) == replace(version("a", weights), name="b")
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


def test_other_sources_and_other_servers_have_others(tmp_path: Path) -> None:
    LastVersions(tmp_path, server=SERVER).keep(SOURCE, version("a", "x"))
    for other in (("https://else", *SERVER[1:]), (*SERVER[:2], 32), (SERVER[0], (), 64)):
        assert last(tmp_path, server=other) is None
    assert last(tmp_path, source=(AdapterSource.HUB, "org/a", "v2", None)) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"digest": 1}', "{digest}"])
def test_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    LastVersions(tmp_path, server=SERVER).keep(SOURCE, version("a", "x"))
    (path,) = (tmp_path / FOLDER).iterdir()
    digest = version("a", "x").digest
    path.write_text(path.read_text().replace(digest, "../x") if text == "{digest}" else text)
    assert last(tmp_path) is None
