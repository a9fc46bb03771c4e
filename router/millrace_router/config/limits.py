"""How much one request, one step and the KV cache may take."""

from __future__ import annotations

from pydantic import BaseModel, Field


class LimitFlags(BaseModel):
    """The limits of requests and of batches."""

    max_concurrent_requests: int = Field(
        default=128, ge=1, description="Requests accepted at once; more are answered 429."
    )
    max_best_of: int = Field(default=2, ge=1, description="Largest `best_of`.")
    max_n: int = Field(default=16, ge=1, description="Largest `n` on the OpenAI routes.")
    max_stop_sequences: int = Field(
        default=4, ge=0, description="Most stop sequences in one request."
    )
    max_top_n_tokens: int = Field(default=5, ge=0, description="Largest `top_n_tokens`.")
    max_client_batch_size: int = Field(
        default=4, ge=1, description="Most prompts in one completion call."
    )
    max_input_tokens: int | None = Field(
        default=None, ge=1, description="Longest prompt in tokens; inferred when absent."
    )
    max_total_tokens: int | None = Field(
        default=None, ge=2, description="Most tokens of prompt and answer; inferred when absent."
    )
    default_max_new_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most new tokens of a request that names no limit; what the context leaves when absent.",
    )
    max_new_tokens_limit: int | None = Field(
        default=None,
        ge=1,
        description="Most new tokens that a request may ask for, and get without asking; no limit of its own when"
        " absent.",
    )
    max_batch_size: int | None = Field(
        default=None,
        description="Most sequences that run together; as many as --max-concurrent-requests when absent.",
    )
    max_batch_prefill_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most prompt tokens that one step computes; 4096, or what fits, when absent.",
    )
    max_batch_total_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Upper bound of the KV capacity in tokens; measured when absent.",
    )
