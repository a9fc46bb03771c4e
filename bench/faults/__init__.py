"""Fault tolerance, measured on the real server: `python -m bench.faults.chaos`.

It starts a launcher through `deployment.deployed`, breaks its processes under load and compares every answer with the
undisturbed one. `streams` has such requests and their comparison for tests too. May import `bench.harness`.
"""
