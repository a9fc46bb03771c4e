"""A conversation in the terminal.

Entry point: `session.Session`. May import: http, errors.
"""
