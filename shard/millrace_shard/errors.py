"""Errors of the shard. The message of a ModelError names the operator's remedy."""

from __future__ import annotations

LONGEST_MESSAGE = 2000


class ModelError(ValueError):
    """The model in this folder cannot be served. The message is one line, whatever names from files it quotes."""

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


class UnsupportedModel(ModelError):  # noqa: N818
    """The architecture or a field of the config needs an unimplemented feature."""


class WeightsError(ModelError):
    """The weights are missing or damaged, or do not fit the config."""


class AdapterInvalid(ValueError):  # noqa: N818
    """An adapter's file is missing or damaged, or does not fit the model."""


class ImageInvalid(ValueError):  # noqa: N818
    """An image that the router puts has other sizes than it says or than the model reads, or its slot is taken."""


class AdapterMemoryFull(Exception):  # noqa: N818
    """An adapter needs more pages than are free."""


class WrongEpoch(Exception):  # noqa: N818
    """A call is for another epoch than the one that is open."""


class EngineEnded(Exception):  # noqa: N818
    """The thread that runs the model has ended."""


class StepInvalid(Exception):  # noqa: N818
    """A step contradicts the state of the batch or itself: the router has sent a wrong step."""


def _one_line(message: str) -> str:
    """`message` without line breaks, control characters and a tail beyond LONGEST_MESSAGE."""
    joined = " ".join(message[: LONGEST_MESSAGE + 1].splitlines())
    text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in joined)
    return text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + "…"
