"""Facts of this machine: devices, cores, ports, sockets, versions.

Imports: config, errors, logs, millrace_proto.
"""
