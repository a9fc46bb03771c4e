"""Families whose layers have experts.

Entry point: the `FAMILY` of each page.
"""
