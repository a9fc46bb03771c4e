"""vLLM's `prompt_logprobs`: for each token of the prompt its log probability, and those of the likeliest tokens."""

from __future__ import annotations

from millrace_router.api.openai.protocol import PromptLogprobJson
from millrace_router.errors import ValidationError
from millrace_router.request.events import PromptLogprobs
from millrace_router.request.float32 import shortest
from millrace_router.request.limits import Limits
from millrace_router.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, for which JSON has no number."""


def check_prompt_logprobs(asked: int | None, limits: Limits, *, stream: bool) -> None:
    """Check the number of candidates; raises ValidationError."""
    if asked is None:
        return
    if not 0 <= asked <= limits.max_top_n_tokens:
        raise ValidationError(
            f"`prompt_logprobs` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {asked}"
        )
    if stream:
        raise ValidationError("`prompt_logprobs` is not supported when streaming tokens")


def prompt_logprobs_json(
    prompt: PromptLogprobs, num_candidates: int, tokenizer: Tokenizer
) -> list[dict[str, PromptLogprobJson] | None]:
    """Render a map from ids to log probabilities for each token, null for the first; the token's own comes first."""
    rendered: list[dict[str, PromptLogprobJson] | None] = [None]
    for index, id_ in enumerate(prompt.ids[1:], start=1):
        likeliest = list(prompt.candidates(index))[:num_candidates]
        ranks = {candidate: rank for rank, (candidate, _) in enumerate(likeliest, start=1)}
        pairs = {id_: prompt.logprobs[index], **dict(likeliest)}
        rendered.append(
            {
                str(one): {
                    "logprob": _number(logprob),
                    "rank": ranks.get(one),
                    "decoded_token": tokenizer.token_text(one),
                }
                for one, logprob in pairs.items()
            }
        )
    return rendered


def _number(logprob: float) -> float:
    number = shortest(logprob)
    return LEAST_LOGPROB if number is None else number
