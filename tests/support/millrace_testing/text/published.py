"""Chat templates as published with their models."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "templates"
FORMATS = {
    "qwen3_coder": "qwen3_coder",
    "glm_4_6": "glm45",
    "glm_4_7": "glm45",
    "granite_3_3": "granite",
    "granite_4_0": "hermes",
    "gpt_oss": "openai",
}
"""The format of calls of each."""


def template(name: str) -> str:
    """The source of a template."""
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
