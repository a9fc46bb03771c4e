"""Metrics, logs and the file of requests.

Entry points: `metrics.Metrics`, `logs.configure`.
Imports: millrace_proto, version.
"""
