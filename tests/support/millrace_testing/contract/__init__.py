"""TGI's contract: what bodies, errors and metrics look like.

Entry point: `contract`.
May import: the router.
"""
