"""The HTTP API, one room for each dialect; they share `chat` and `body`.

Every dialect has `routes` with `register(app)`.
May import: server, engine, validation, recovery, shards, tool_calls, request, text, telemetry.
"""
