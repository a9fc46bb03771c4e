"""Millrace as one program and one library, on top of the router, the shards and the launcher.

Entry point: `__main__.main`, the command `millrace`. May import: every other package.
"""
