"""Fault tolerance: epochs, hang detection, poison requests and OOM backoff.

Entry points: `epochs.EpochManager`, `recovery_policy.RecoveryPolicy`.
May import: shards, scheduler, request, prediction, telemetry.
"""
