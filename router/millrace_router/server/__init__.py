"""The HTTP end: bodies in, server-sent events out, idempotency, access log.

Entry points: `bodies.read_model`, `sse.respond`, `services.Services`.
May import: engine, validation, recovery, shards, tool_calls, request, text, prediction, telemetry; never api.
"""
