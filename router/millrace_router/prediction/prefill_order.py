"""The rule by which short prompts come before long ones. Pure arithmetic over prompt tokens.

At least half of each step's budget goes to prompts in order of arrival. So no prompt takes more than twice as many
steps as in order of arrival, however many prompts overtake it, and none starves.
"""

from __future__ import annotations

MAX_EARLY = 3
"""Overtaking prompts that may be computed in part at once: each holds KV blocks for all of its tokens."""
LEAST_PROMPT_SHARE = 0.9
"""Share of a step's time that goes to its prompts when the step is as long as it may be. Short steps let new prompts
join soon; at this length the decodes beside them and the weights slow prompts down by a tenth."""


def longest_overtaking(num_left: int) -> int:
    """Most tokens that a prompt may lack to overtake one that lacks `num_left`.

    Prompts of like length come in order of arrival: sharing steps would only make the older one later.
    """
    return num_left // 2


def max_step_seconds(seconds_without_prompts: float) -> float:
    """Seconds that a step with prompts should take at most, from those of the same step without prompts."""
    return seconds_without_prompts / (1.0 - LEAST_PROMPT_SHARE)
