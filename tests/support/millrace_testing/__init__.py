"""Fakes, drivers and references that tests share.

One room for each part of the system.
May import: all planes; nothing imports it but tests and bench.
"""
