"""Metrics, logs and the file of requests.

Entry points: `metrics.Metrics`, `logs.configure`.
May import: config and version.
"""
