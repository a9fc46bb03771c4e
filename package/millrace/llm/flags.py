"""Keyword arguments as flags of the launcher."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping

from millrace.errors import StartError
from millrace_launcher.settings.arguments import Settings, read_settings
from millrace_proto.flags import option_name

PROGRAM = "LLM"


def arguments_of(model: str | None, flags: Mapping[str, object]) -> list[str]:
    """`max_total_tokens=512` as `--max-total-tokens=512`; True is a switch, None and False are left out."""
    words = [] if model is None else [f"--model-id={model}"]
    for name, value in flags.items():
        option = option_name(name)
        if value is True:
            words.append(option)
        elif isinstance(value, (list, tuple)):
            words += [f"{option}={each}" for each in value]
        elif value is not None and value is not False:
            words.append(f"{option}={value}")
    return words


def settings_of(model: str | None, flags: Mapping[str, object]) -> Settings:
    """The launcher's settings. Raises StartError where a flag is wrong."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return read_settings(arguments_of(model, flags), program=PROGRAM)
    except SystemExit:
        words = said.getvalue().partition("\n\nFor more")[0]
        raise StartError(words.removeprefix("error: ")) from None
