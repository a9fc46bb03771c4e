"""Profiles: flame graphs of a decode step and of the router, CPU time by plane.

Entry points: `python -m bench.profile` and `python -m bench.profile.router_share`.
May import `bench.harness`, `bench.peers` and `bench.charts`.
"""
