"""Servers under test: started here, or given by URL; and plain transformers.

Entry points: `deployment`, `client`.
May import: verify.requests, settings, supervision.
"""
