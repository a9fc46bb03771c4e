"""Ranks of a model on the hosts of a Ray cluster. Nothing else of Millrace imports Ray.

Entry point: `__main__`, a child of the launcher with `--cluster ray`.
"""
