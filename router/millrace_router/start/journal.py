"""Opens the journal that the flags name."""

from __future__ import annotations

import secrets

from millrace_router.config import RouterConfig
from millrace_router.journal.header import Header, Setting
from millrace_router.journal.journal import Journal
from millrace_router.journal.rotation import JournalFolder
from millrace_router.journal.writer import JournalWriter
from millrace_router.server.services import Services
from millrace_router.shards.step_channel import StepChannel
from millrace_router.version import VERSION

SETTINGS = (
    "max_concurrent_requests",
    "max_batch_size",
    "prefill_order",
    "prefix_caching",
    "kv_reservation",
    "target_inter_token_latency",
    "fairness",
    "priority_ageing",
    "max_queue_size",
    "max_queue_wait",
    "steps_in_flight",
    "late_planning",
    "step_timeout",
    "adapter_cycle_time_s",
)
"""Flags that affect the schedule."""


def journal_folder(config: RouterConfig) -> JournalFolder | None:
    """Open the folder of --journal, if the flag is given; raises JournalError."""
    if config.journal is None:
        return None
    return JournalFolder(config.journal, max_bytes=config.journal_max_bytes)


def record_steps(
    folder: JournalFolder | None, services: Services, channel: StepChannel
) -> Journal | None:
    """Record the steps of this run in a new journal, if there is a folder for it."""
    if folder is None:
        return None
    config = services.config
    settings: dict[str, Setting] = {name: getattr(config, name) for name in SETTINGS}
    header = Header(
        life=secrets.token_hex(8),
        version=VERSION,
        model_id=config.model_id,
        model_sha=config.revision,
        keeps_tokens=config.journal_tokens,
        shard=services.shard,
        warmup=channel.group.warmup_fields,
        capacity=services.capacity,
        settings=settings | {"max_batch_prefill_tokens": services.max_batch_prefill_tokens},
    )
    journal = Journal(JournalWriter(folder, header), services.metrics.journal_dropped_records)
    channel.observer = journal
    return journal
