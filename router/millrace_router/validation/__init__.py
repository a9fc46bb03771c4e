"""TGI's rules for requests, and the admission of grammars by the shards.

Entry point: `validator.Validator`.
May import: recovery, shards, tool_calls, request, text, telemetry.
"""
