"""What can be wrong with a model before it serves: each is the operator's to mend, and says how."""

from __future__ import annotations


class ModelError(ValueError):
    """The model in this folder cannot be served."""


class UnsupportedModel(ModelError):  # noqa: N818
    """Its architecture, or a field of its config, asks for what is not implemented."""


class WeightsError(ModelError):
    """Its weights are missing, damaged, or not those that its config describes."""


class EngineEnded(Exception):  # noqa: N818
    """The thread that runs the model is no more."""


class StepInvalid(Exception):  # noqa: N818
    """A step contradicts the state of the batch or itself: the fault is the sender's."""
