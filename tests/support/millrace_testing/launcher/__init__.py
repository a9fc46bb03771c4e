"""Launchers of real and fake children.

Entry points: `fake_launcher`, `e2e`.
May import: all planes.
"""
