"""A client of servers over HTTP, and the reader of their event streams.

Entry points: `client.Client`, `sse.EventReader`.
Imports: errors.
"""
