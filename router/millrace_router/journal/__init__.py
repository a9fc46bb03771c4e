"""Records every message to the shards, for a replay.

Entry point: `journal.Journal`.
May import: shards, telemetry, and protobuf.
"""
