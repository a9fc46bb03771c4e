"""Replicas of a server on Ray Serve, behind an HAProxy on each node.

Entry point: `application.build`. A `Replica` starts a launcher and tells the `Directory` where it is; the directory has
a `NodeProxy` on each node, which runs HAProxy and keeps its list of servers equal to the directory's.
"""
