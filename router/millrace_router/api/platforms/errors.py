"""What platforms are told in words of their own: KServe everywhere, Vertex AI where TGI is followed strictly.

RouterError
├── NotUtf8                422  utf8                      (KServe)
├── LengthMismatch         422  length mismatch           (KServe)
├── NoInstances            422  Input validation error    (Vertex AI, with `--strict-tgi`)
└── IncompletePrediction   500  Incomplete generation     (both, with `--strict-tgi`)
"""

from __future__ import annotations

from millrace_router.errors import RouterError


class NotUtf8(RouterError):
    """The bytes of a tensor are no text."""

    status = 422
    error_type = "utf8"
    failure_label = "validation"


class LengthMismatch(RouterError):
    """There are not as many names for the answers as there are questions."""

    status = 422
    error_type = "length mismatch"
    failure_label = "validation"

    def __init__(self) -> None:
        super().__init__("Inputs and outputs length mismatch")


class NoInstances(RouterError):
    """There is nothing to predict, in TGI's words for Vertex AI."""

    status = 422
    error_type = "Input validation error"
    failure_label = "validation"

    def __init__(self) -> None:
        super().__init__("Input validation error")


class IncompletePrediction(RouterError):
    """What TGI tells platforms of whatever has failed, which has been counted for what it is."""

    error_type = "Incomplete generation"

    def __init__(self) -> None:
        super().__init__("Incomplete generation")
