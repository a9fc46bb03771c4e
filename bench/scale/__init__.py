"""`python -m bench.scale`: many replicas.

Entry point: `__main__.main`.
May import: what bench may.
"""
