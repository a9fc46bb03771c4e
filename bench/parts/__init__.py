"""Benchmarks that are made of parts: cases, a server for each, a table and conclusions.

Entry points: `part.Part` and `run.run_parts`. Used by `bench.policies`, `bench.scheduling` and
`bench.structured_output`.
May import `bench.harness`.
"""
