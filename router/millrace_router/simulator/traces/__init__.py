"""Workloads recorded in files: in the simulator's own form, and as Mooncake, Azure and Qwen-Bailian publish them.

Entry point: `reader.read_trace`.
May import: what the simulator may.
"""
