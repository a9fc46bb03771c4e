"""The commands of `millrace-shard`.

Entry point of each: `main`.
May import: every other room of the shard.
"""
