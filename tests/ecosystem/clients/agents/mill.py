"""The tools of the agents' tests, and what is told of their calls."""

from __future__ import annotations

called: list[str] = []
"""The calls so far."""


def wind(place: str) -> str:
    """Tell the wind at a place."""
    called.append(f"wind {place}")
    return f"strong at the {place}"


def grind(grain: str, sacks: int) -> str:
    """Grind sacks of a grain."""
    called.append(f"grind {grain} {sacks}")
    return f"{sacks} sacks ground"


def check_calls() -> None:
    """That both tools were called, in their order; forgets the calls."""
    assert called == ["wind river", "grind rye 2"], called
    called.clear()
