"""The journal: records every message to and from the shards, for a replay.

Entry point: `journal.Journal`.
May import: shards, telemetry, and protobuf.
"""
