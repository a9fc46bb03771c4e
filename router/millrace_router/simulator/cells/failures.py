"""Replicas that fail for a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Failure:
    """`count` replicas fail `at` a time and are back, empty, after `seconds`; they are spread over the cells."""

    at: float
    count: int
    seconds: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `AT:COUNT:FOR`, times in seconds.

        Raises:
            ValueError: it is something else.

        """
        try:
            at, count, seconds = text.split(":")
            failure = cls(float(at), int(count), float(seconds))
        except ValueError:
            raise ValueError(_expected(text)) from None
        if not (0 <= failure.at < math.inf and failure.count >= 1 and failure.seconds > 0):
            raise ValueError(_expected(text))
        return failure


def _expected(text: str) -> str:
    return f"{text!r} is no failure: give AT:COUNT:FOR, such as 60:3:120"
