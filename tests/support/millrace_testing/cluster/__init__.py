"""Hosts of a cluster, as network namespaces of this machine."""
