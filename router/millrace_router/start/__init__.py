"""The start of a router, from its flags to everything but its HTTP port.

Entry point: `running.start`.
Imports: access, adapters, config, engine, errors, images, journal, kv_events, millrace_proto, pooling, prediction,
reasoning, recovery, request, scheduler, server, shards, telemetry, text, tool_calls.formats, tool_calls.parsing,
validation, version.
"""
