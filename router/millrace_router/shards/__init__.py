"""The router's side of the wire: calls to all ranks of a group, and one stream of numbered steps.

Entry points: `group.ShardGroup`, `step_channel.StepChannel`.
May import: scheduler, request, and protobuf.
"""

import os

# gRPC reads it when it is imported. uvloop forks to start the fetching process, and with gRPC's own handlers of a fork
# some of these children end with SIGSEGV. No child of the router uses gRPC.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
