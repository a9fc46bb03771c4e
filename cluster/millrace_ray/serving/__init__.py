"""Replicas of a server on Ray Serve, behind an HAProxy on each node.

Entry point: `application.build`. A `Replica` starts a launcher and registers its address with the `Directory`;
the directory has a `NodeProxy` on each node, which runs HAProxy and keeps its list of servers equal to the directory's.
Imports: child, host.
"""
