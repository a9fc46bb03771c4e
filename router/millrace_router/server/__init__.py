"""The HTTP end: bodies in, server-sent events out, idempotency, access log.

Entry points: `bodies.read_model`, `sse.respond`, `services.Services`.
Imports: access, adapters, config, engine, errors, images, pooling, prediction, reasoning, recovery, request, shards,
telemetry, text, tool_calls.parsing, validation, version.
"""
