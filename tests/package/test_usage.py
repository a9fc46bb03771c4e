"""Help texts show the program as it was typed, where a command has two names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("command", ["simulate", "verify"])
@pytest.mark.parametrize("is_through_millrace", [False, True])
def test_the_usage_has_the_program_that_was_typed(
    command: str,
    is_through_millrace: bool,
    tmp_path: Path,
) -> None:
    words = ["millrace", command] if is_through_millrace else [f"millrace-{command}"]
    module = "millrace" if is_through_millrace else f"millrace.{command}"
    script = tmp_path / words[0]
    script.write_text(
        f"import sys\nfrom {module}.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    shown = subprocess.run(
        [sys.executable, str(script), *words[1:], "--help"],
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    assert shown.startswith(f"usage: {' '.join(words)} ")
