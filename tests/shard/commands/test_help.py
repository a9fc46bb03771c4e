"""Each command of `millrace-shard` has a line in its list and a help text, also where only the launcher uses it."""

from __future__ import annotations

import pytest

from millrace_shard.__main__ import COMMANDS, main


def test_the_list_says_what_each_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (_, text) in COMMANDS.items():
        assert f"  {name} " in shown
        assert text in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_its_help_and_does_not_run(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: millrace-shard {name} " in capsys.readouterr().out
