"""Facts of this machine: devices, cores, ports, sockets, versions.

May import: logs, config, errors, and the `config` modules of the planes.
"""
