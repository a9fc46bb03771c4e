"""Spans of requests, from the records of their moments.

Entry point: `request_traces.RequestTraces`.
May import: engine and below.
"""
