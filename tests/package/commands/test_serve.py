"""The launcher's arguments of `millrace serve`."""

from __future__ import annotations

import pytest

from millrace.commands.serve import launcher_arguments, main
from millrace_launcher.settings.arguments import read_settings


def test_the_first_word_names_the_model() -> None:
    settings = read_settings(launcher_arguments(["a/b", "--port", "81"]), {})
    assert (settings.launcher.model_id, settings.router.port) == ("a/b", 81)


def test_flags_alone_are_the_launchers() -> None:
    assert launcher_arguments(["--model-id", "a/b"]) == ["--model-id", "a/b"]
    assert launcher_arguments([]) == []


def test_an_error_is_that_of_the_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["a/b", "--prot", "81"])
    assert end.value.code == 2
    assert "'--port'" in capsys.readouterr().err
