"""The router's end of the wire: one stream of numbered steps to every rank.

Entry point: `group.ShardedClient`.
May import: scheduler, request, and protobuf.
"""
