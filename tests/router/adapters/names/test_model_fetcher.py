"""Which token a fetch has: the server's own for the operator's adapters alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from millrace_router.adapters.cache import AdapterCache
from millrace_router.adapters.fetch_request import FetchLimits, FetchSource
from millrace_router.adapters.fetcher import Fetcher
from millrace_router.adapters.names.last_versions import LastVersions
from millrace_router.adapters.names.model_fetcher import ModelFetcher
from millrace_router.adapters.names.sources import NamedSource
from millrace_router.request.adapter import AdapterSource, AdapterVersion
from millrace_testing.adapters.fake_adapters import MODULE, version_of


@dataclass
class Recorder:
    """Keeps the sources that it was asked for."""

    sources: list[FetchSource] = field(default_factory=list)

    async def fetch(self, source: FetchSource, **_: Any) -> AdapterVersion:
        self.sources.append(source)
        return version_of(source.name)

    async def commit_of(self, source: FetchSource, **_: Any) -> str:
        self.sources.append(source)
        return "commit"


@pytest.mark.parametrize(
    ("by_operator", "given", "used"),
    [(True, None, "server"), (False, None, None), (False, "client", "client")],
)
async def test_whose_token_counts(
    tmp_path: Path, *, by_operator: bool, given: str | None, used: str | None
) -> None:
    recorder = Recorder()
    fetcher = ModelFetcher(
        fetcher=cast("Fetcher", recorder),
        cache=AdapterCache(tmp_path, max_bytes=0, clock=lambda: 0.0),
        last_versions=LastVersions(tmp_path, server=()),
        modules=(MODULE,),
        limits=FetchLimits(),
        num_pages=1,
        server_token=lambda: "server",
    )
    source = NamedSource(
        kind=AdapterSource.HUB, location="org/a", revision="v1", by_operator=by_operator
    )
    await fetcher.fetch(source, name="a", token=given, caller="me")
    await fetcher.commit_of(source, name="a", token=given, caller="me")
    for asked in recorder.sources:
        assert (asked.token, asked.id, asked.revision) == (used, "org/a", "v1")
        assert (asked.name, asked.caller, asked.root) == ("a", "me", None)
    assert len(recorder.sources) == 2
