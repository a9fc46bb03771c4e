"""The gRPC server of a shard: protobuf, TLS and sockets.

Entry point: `service.ShardService`.
May import: engine and below, and protobuf.
"""
