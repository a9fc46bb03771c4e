"""The rule by which short prompts come before long ones. Pure arithmetic over prompt tokens.

At least half of the time of prompts goes to prompts in order of arrival. So no prompt takes more than twice as long as
in order of arrival, however many prompts overtake it, and none starves.

The step of a few short prompts leaves out the long one, so that it is short; the next step makes up for that.
"""

from __future__ import annotations

OVERTAKING_SHARE = 1 / 2
"""Share of a step's budget for prompts that overtake older ones …"""
SHARE_AFTER_DEFERRAL = 1 / 4
"""… and in the step after one that left out the oldest prompt."""
DEFERRAL_SHARE = 1 / 8
"""A step leaves out the oldest prompt if those that overtake it take no more of its budget than this."""
MAX_EARLY = 3
"""Overtaking prompts that may be computed in part at once: each holds KV blocks for all of its tokens."""
LEAST_PROMPT_SHARE = 0.9
"""Share of a step's time that goes to its prompts when the step is as long as it may be. Short steps let new prompts
join soon; at this length the step's decodes and the weights slow prompts down by a tenth."""


def longest_overtaking(num_left: int) -> int:
    """Most tokens that a prompt may lack to overtake one that lacks `num_left`.

    Prompts of like length come in order of arrival: sharing steps would only make the older one later.
    """
    return num_left // 2


def max_step_seconds(seconds_beside_prompts: float) -> float:
    """Return seconds that a step with prompts should take at most, from those that its prompts do not account for."""
    return seconds_beside_prompts / (1.0 - LEAST_PROMPT_SHARE)
