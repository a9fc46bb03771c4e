"""Engines and servers that are compared: ours, the peers' and earlier revisions of ours.

Entry points: `engines.OFFLINE` (engines without HTTP) and `servers.SERVERS` (servers over HTTP).
Each engine runs in its own process. May import `bench.harness`.
"""
