"""Replays a journal on other shards and compares the answers.

Entry point: `command.replay`.
Imports: config, journal, millrace_proto, request, shards.
"""
