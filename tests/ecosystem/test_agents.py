"""Agents of others hold conversations of several turns with a server whose model says what `scripts` has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.harness.server import RunningServer
from tests.ecosystem.agents.conversations import NotInstalled, conversations
from tests.ecosystem.agents.server import scripted_server

pytestmark = pytest.mark.ecosystem


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A launcher with the scripted model."""
    with scripted_server(tmp_path_factory.mktemp("agents")) as running:
        yield running


@pytest.mark.parametrize("name", conversations())
def test_an_agent_s_conversation(scripted: RunningServer, name: str, tmp_path: Path) -> None:
    try:
        conversations()[name](scripted.url, tmp_path)
    except NotInstalled as error:
        pytest.skip(str(error))
