"""The device: process groups, transfers, failures, stopwatch.

Entry points: `process_group`, `transfers`.
May import: arrays and errors alone.
"""
