"""Subscribers of KV-cache events, and random lives of a prefix cache."""
