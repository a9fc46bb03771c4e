"""Schemas as people mean them: with the types that they leave out, and closed objects.

Entry points: `implied_types.with_implied_types`, `closed_objects.with_closed_objects`.
May import: nothing of the router.
"""
