"""A request from its parameters to its entry, token stream and events.

Entry points: `generation_request.GenerationRequest`, `request.ValidRequest`, `entry.Entry`.
Imports: errors, millrace_proto, text.
"""
