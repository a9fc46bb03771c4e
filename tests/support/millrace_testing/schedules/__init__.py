"""Drives the scheduler through random stories.

Entry point: `driver`.
May import: the router.
"""
