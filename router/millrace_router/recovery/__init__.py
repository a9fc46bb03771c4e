"""Epochs, hangs, poison requests and memory that runs out.

Entry points: `epochs.Lifeline`, `recovery_policy.Rescue`.
May import: shards, scheduler, request, prediction, telemetry.
"""
