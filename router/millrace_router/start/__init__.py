"""The start of a router, from its flags to everything but its HTTP port.

Entry point: `running.start`.
May import: api, server and below.
"""
