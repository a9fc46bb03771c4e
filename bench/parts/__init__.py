"""Benchmarks that are made of parts: cases, a server for each, a table and conclusions.

Entry points: `part.Part` and `run.run_parts`. Used by `bench.adapters`, `bench.policies` and
`bench.scheduling`.
May import `bench.harness`.
"""
