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
LONGEST_PROMPT_STEP = 0.5
"""Seconds of a step without decodes, or longer where its prompts would not take `LEAST_PROMPT_SHARE` of it. With two
steps in flight, one whose client has left delays others by twice as much."""
LEAST_PROMPT_SHARE = 0.9
"""Share of the longest step's time that goes to its prompts: the weights and the decodes slow them down by a tenth."""
MOST_STEPS = 3.0
"""A step with prompts and many decodes lasts at most as long as so many steps without prompts."""
LEAST_OVER_FIXED = 3.0
"""Prompt tokens may take so many times what any of them add to a step: smaller chunks would cost throughput."""
NO_STALL = 0.02
"""Seconds of a pause that is not noticed."""


def longest_overtaking(num_left: int) -> int:
    """Most tokens that a prompt may lack to overtake one that lacks `num_left`.

    Prompts of like length come in order of arrival: sharing steps would only make the older one later.
    """
    return num_left // 2


def max_step_seconds(plain: float, least: float, num_streams: int, target: float | None) -> float:
    """Return seconds that a step with prompts should take at most, `target` if there is one.

    It takes `plain` without prompts, and `least` with them, their tokens not counted. All of `num_streams` wait for
    it: one stream may wait for ten times `plain`, two for 4.75 times, and many for three times.
    """
    longest_share = 1.0 / (1.0 - LEAST_PROMPT_SHARE)
    longest = max(LONGEST_PROMPT_STEP, longest_share * least)
    if not num_streams:
        return longest
    if target is None:
        multiple = MOST_STEPS + (longest_share - MOST_STEPS) / num_streams**2
        target = max(multiple * plain, least + LEAST_OVER_FIXED * (least - plain), NO_STALL)
    return min(target, longest)
