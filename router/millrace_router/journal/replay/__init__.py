"""Replays a journal on other shards and compares the answers.

Entry point: `command.replay`.
May import: journal, shards, and protobuf.
"""
