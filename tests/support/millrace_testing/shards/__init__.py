"""Fake shards, and real ones with planned faults.

Entry point: `fake_shard`.
May import: all planes.
"""
