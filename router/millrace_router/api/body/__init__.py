"""Parts that the bodies of all dialects share: types of fields, grammars, adapters, and fields of other servers.

Entry points: `fields.RequestModel`, `reading.read_request`.
Imports: adapters, errors, millrace_proto, request, server, text, tool_calls, validation.
"""
