"""millrace-verify on a tiny checkpoint of every supported architecture, which takes minutes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from millrace.verify.__main__ import main
from millrace_testing.models.models import CONFIGS
from millrace_testing.models.tiny_models import save_with_tokenizer


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_every_promise_holds(
    model_type: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    save_with_tokenizer(tmp_path, model_type)
    code = main([str(tmp_path), "--requests=8", f"--log-dir={tmp_path / 'logs'}"])
    shown = capsys.readouterr()
    with capsys.disabled():
        sys.stdout.write(f"\n{model_type}\n{shown.out}")
    assert code == 0, shown.out + shown.err


def test_every_promise_holds_on_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    code = main([])
    shown = capsys.readouterr()
    with capsys.disabled():
        sys.stdout.write(f"\n{shown.out}")
    assert code == 0, shown.out + shown.err
