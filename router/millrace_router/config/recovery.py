"""What outlives a failure: steps, streams, stored answers, the journal."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field


class RecoveryFlags(BaseModel):
    """The times of recovery and of resumption, and what is kept."""

    step_timeout: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that a step always gets; one that takes longer, and far longer than "
        "predicted, means that the shards hang: they are restarted.",
    )
    recovery_grace: float = Field(
        default=300.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that shards may take to come back; then /health fails and requests end.",
    )
    resume_grace: float = Field(
        default=10.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that a request with an Idempotency-Key outlives its connection, and can "
        "be resumed; 0 ends it with the connection.",
    )
    responses_store: int = Field(
        default=0,
        ge=0,
        description="MiB of memory for answers of /v1/responses, which `previous_response_id` refers "
        "to; the oldest are forgotten first, and 0 stores none.",
    )
    responses_store_seconds: float = Field(
        default=3600.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds after which a stored response is forgotten.",
    )
    journal: Path | None = Field(
        default=None,
        description="Folder to record every step in, for replay; none is kept when absent.",
    )
    journal_tokens: bool = Field(
        default=False,
        description="Record token ids, log probabilities and grammars as well: all that is asked and "
        "answered can be read from them.",
    )
    journal_max_bytes: int = Field(
        default=1 << 30,
        ge=1 << 16,
        description="Bytes that journal files may take together; the oldest make room for new ones.",
    )
    supervisor_fd: int | None = Field(
        default=None,
        ge=0,
        description="Socket to the launcher, inherited; for the launcher's use.",
    )
