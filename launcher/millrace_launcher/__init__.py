"""The launcher: starts, watches and stops the router and the shards."""

import os

# gRPC reads this once, before its first use. Otherwise it writes to stderr what becomes of connections that end.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
