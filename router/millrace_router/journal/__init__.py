"""The journal: records every message to and from the shards, for a replay.

Entry point: `journal.Journal`.
Imports: millrace_proto, request, shards, telemetry.
"""
