"""One running server for all ecosystem tests: the launcher with the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.harness.server import RunningServer, serving

ROOT = Path(__file__).parent.parent.parent
DEMO_MODEL = ROOT / "demo" / "model"


LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"


def scoring_model(folder: Path) -> Path:
    """Make a folder with the demo model, whose scores are the difference of the logits of two tokens."""
    model = folder / "demo" / "model"
    (model / "1_LogitScore").mkdir(parents=True)
    for file in DEMO_MODEL.iterdir():
        (model / file.name).symlink_to(file)
    module = {"idx": 0, "name": "0", "path": "1_LogitScore", "type": LOGIT_SCORE}
    (model / "modules.json").write_text(json.dumps([module]))
    tokens = {"true_token_id": 5, "false_token_id": 6}
    (model / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    return model


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A launcher on a free port, for all tasks; on failure to start, the end of its log is the error."""
    folder = tmp_path_factory.mktemp("launcher")
    flags = "--enable-prefill-logprobs", "--task=generate,embed,score"
    with serving(scoring_model(folder), log=folder / "launcher.log", flags=flags) as running:
        yield running
