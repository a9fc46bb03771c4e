"""A router without shards, and readers of its answers.

Entry point: `fake_router`.
May import: all planes.
"""
