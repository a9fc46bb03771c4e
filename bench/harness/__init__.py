"""Shared by all benchmarks: load, servers under load, statistics, a quiet machine, results.

Entry points: `server.serving` starts our launcher, `record.Record` prints and writes a result.
May import the launcher's helpers, and no other room of `bench`.
"""
