"""Drives the scheduler through random schedules.

Entry point: `driver`.
May import: the router.
"""
