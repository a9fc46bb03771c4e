"""The gRPC server of a shard: protobuf, TLS and sockets.

Entry point: `service.ShardService`.
Imports: adapters, arrays, batch, config, engine, errors, kernels, millrace_proto, structured_output, vision.
"""
