"""The device: process groups, transfers, failures, stopwatch, pulse.

Entry points: `process_group`, `transfers`.
Imports: arrays, millrace_proto.
"""
