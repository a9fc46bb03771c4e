"""The device: process groups, transfers, failures, stopwatch.

Entry points: `process_group`, `transfers`.
May import: nothing of the shard but arrays and errors.
"""
