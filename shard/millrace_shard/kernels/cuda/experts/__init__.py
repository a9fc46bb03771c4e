"""Mixtures of experts by Triton, without waits of the host.

Entry point: `grouped_experts.GroupedExperts`.
"""
