"""The gRPC server: protobuf in and out, TLS, sockets.

Entry point: `service.ShardService`.
May import: engine and below, and protobuf.
"""
