"""The requests of the cases.

Entry point: `suite.Suite`.
May import: nothing of verify but this room.
"""
