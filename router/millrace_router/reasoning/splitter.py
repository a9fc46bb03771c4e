"""What all splitters of thought and answer have in common."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple, Protocol


class Start(Enum):
    """Where an answer begins, as the end of its prompt tells."""

    FREE = auto()
    """The model may open a thought."""
    OPEN = auto()
    """The prompt ends within a thought."""
    CLOSED = auto()
    """The prompt ends behind a thought, which is empty if the model is not to think."""


class Split(NamedTuple):
    """The parts of a piece of text."""

    thought: str
    answer: str


class Splitter(Protocol):
    """Splits one answer; the cuts between pushed pieces make no difference to the joined parts."""

    @property
    def thinks(self) -> bool:
        """Whether the text so far ends within a thought."""

    def push(self, text: str, /) -> Split:
        """Split more text; text that may begin a tag is held back."""

    def finish(self) -> Split:
        """Split the held text as the end of the answer."""
