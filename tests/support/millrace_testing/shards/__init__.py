"""Shards that are fake, slow, poisonous or doomed.

Entry point: `fake_shard`.
May import: all planes.
"""
