"""Tiny checkpoints and a fake hub.

Entry point: `models`.
May import: the shard.
"""
