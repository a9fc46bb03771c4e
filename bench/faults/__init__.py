"""Fault tolerance, measured on the real server: `python -m bench.faults` and `python -m bench.faults.chaos`.

Both start a launcher through `deployment.deployed`, break its processes and compare every answer with an undisturbed
run. May import `bench.harness` and `bench.charts`.
"""
