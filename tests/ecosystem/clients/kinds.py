"""Kinds of answers as `pydantic` has them, which a model of any quality can give in a few tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Mill(BaseModel):
    """A mill."""

    model_config = ConfigDict(extra="forbid")

    stands_by: Literal["river", "sea"]
    has_wheel: bool


class Wind(BaseModel):
    """The wind at a place."""

    model_config = ConfigDict(extra="forbid")

    place: Literal["river", "sea"]
    strong: bool
