"""Fault tolerance: epochs, hang detection, poison requests and OOM backoff.

Entry points: `epochs.EpochManager`, `recovery_policy.RecoveryPolicy`.
Imports: errors, millrace_proto, prediction, request, scheduler, shards, telemetry.
"""
