"""Runs a recorded journal again on other shards and compares.

Entry point: `command.replay`.
May import: journal, shards, and protobuf.
"""
