"""Errors of the shard. The message of a ModelError tells the operator how to solve it."""

from __future__ import annotations


class ModelError(ValueError):
    """The model in this folder cannot be served."""


class UnsupportedModel(ModelError):  # noqa: N818
    """The architecture or a field of the config needs an unimplemented feature."""


class WeightsError(ModelError):
    """The weights are missing or damaged, or do not fit the config."""


class AdapterInvalid(ValueError):  # noqa: N818
    """An adapter's file is missing or damaged, or does not fit the model."""


class AdapterMemoryFull(Exception):  # noqa: N818
    """An adapter needs more pages than are free."""


class WrongEpoch(Exception):  # noqa: N818
    """A call is for another epoch than the one that is open."""


class EngineEnded(Exception):  # noqa: N818
    """The thread that runs the model has ended."""


class StepInvalid(Exception):  # noqa: N818
    """A step contradicts the state of the batch or itself: the router has sent a wrong step."""
