"""The square to which PaliGemma brings a picture, and the text that stands for it in a prompt. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from millrace_router.images.gemma3 import SquareGeometry, square_edge
from millrace_router.images.geometry import IMAGE, check_flags

FAMILIES = ("paligemma",)
_BICUBIC = 3
_BOS = "<bos>"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaliGemmaGeometry(SquareGeometry):
    """The settings of a processor. Prompts are texts after pictures, between a token and the end of a line."""

    resample: ClassVar[int] = _BICUBIC
    placeholder: ClassVar[str] = IMAGE
    needed_tokens: ClassVar[tuple[str, ...]] = IMAGE, _BOS
    framed: ClassVar[tuple[str, str]] = _BOS, "\n"

    @classmethod
    def of(cls, family: str, processor: Mapping[str, Any]) -> Self:
        """Read preprocessor_config.json; raises GeometryError."""
        check_flags(processor, resample=_BICUBIC)
        return cls(family=family, edge=square_edge(processor))

    def expansion(self, rows: int, columns: int, rows_per_tile: int) -> str:  # noqa: ARG002
        """Return the placeholders of a picture."""
        return IMAGE * rows_per_tile
