"""TGI's rules for requests, and the admission of grammars by the shards.

Entry point: `validator.Validator`.
Imports: errors, millrace_proto, recovery, request, shards, telemetry, text.
"""
