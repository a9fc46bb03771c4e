"""Families with norms after attention and feed-forward, around them, or one norm for both.

Entry point: the page of a family.
"""
