"""The requests that are asked again and again.

Entry point: `suite`.
May import: nothing of verify but this room.
"""
