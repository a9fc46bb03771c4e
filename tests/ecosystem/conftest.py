"""One running server for all ecosystem tests: the launcher with the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.harness.server import RunningServer, serving

ROOT = Path(__file__).parent.parent.parent
DEMO_MODEL = ROOT / "demo" / "model"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A launcher on a free port; on failure to start, the end of its log is the error.

    The demo model has no tokens "yes" and "no", so it cannot score.
    """
    log = tmp_path_factory.mktemp("launcher") / "launcher.log"
    flags = "--enable-prefill-logprobs", "--task=generate,embed"
    with serving(DEMO_MODEL, log=log, flags=flags) as running:
        yield running
