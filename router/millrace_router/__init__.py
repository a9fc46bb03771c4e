"""The router: requests, text, queueing, token budgets, KV blocks and batching. No torch."""

import os

# gRPC reads this once, before its first use. Otherwise its handlers run in each process that the router starts, between
# fork and exec, and crash some of them.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
