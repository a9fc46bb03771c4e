"""The levels of a comparison, by the name of the checkpoint."""

from __future__ import annotations

from millrace.load.levels import Level, closed, poisson

DEFAULT_LEVELS: dict[str, tuple[Level, ...]] = {
    "135m": (
        closed(1, 128, 64, rounds=4),
        closed(8, 128, 64),
        closed(32, 128, 64),
        closed(32, 128, 128, rounds=1),
        poisson(4, 128, 64, num_requests=60),
    ),
    "1b": (),
}
