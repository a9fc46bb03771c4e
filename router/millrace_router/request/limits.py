"""The limits of one request; known once the shards have warmed up."""

from __future__ import annotations

from dataclasses import dataclass

from millrace_router.request.dialect import MILLRACE, Dialect
from millrace_router.request.request import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds of a request, in TGI's names."""

    max_input_tokens: int
    max_total_tokens: int
    vocab_size: int
    """Tokens of the model: ids are smaller than this."""
    default_max_new_tokens: int | None = None
    """Not in TGI: most new tokens of a request that names no limit; None for what the context leaves."""
    max_new_tokens_limit: int | None = None
    """Not in TGI: most new tokens that a request may name."""
    max_concurrent_requests: int = 128
    max_best_of: int = 2
    max_n: int = 16
    """Not in TGI: choices of one prompt on the OpenAI routes."""
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 4
    prefill_logprobs: bool = False
    """Whether the shards report log probabilities of prompts."""
    grammars: bool = False
    """Whether the shards support grammars and the configuration allows them."""
    tasks: frozenset[Task] = frozenset({Task.GENERATE})
    dialect: Dialect = MILLRACE
