"""Epochs, hangs, poison requests and memory that runs out.

Entry points: `epochs.EpochManager`, `recovery_policy.RecoveryPolicy`.
May import: shards, scheduler, request, prediction, telemetry.
"""
