"""The error of an application that cannot be served."""

from __future__ import annotations

import click


class ServingError(click.ClickException):
    """`str` is a sentence; the program `serve` prints it alone."""

    def __str__(self) -> str:
        return self.message
