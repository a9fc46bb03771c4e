"""Adapters of fake shards, and histories of requests for adapters.

Entry point: `fake_adapters`.
May import: the router's rooms up to `shards`.
"""
