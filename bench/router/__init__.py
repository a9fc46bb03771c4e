"""The cost of the router alone, over a shard that computes nothing: `python -m bench.router`.

May import `bench.harness`.
"""
