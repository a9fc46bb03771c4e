"""What the router alone costs, over a shard that computes nothing: `python -m bench.router`.

May import `bench.harness`, `bench.charts` and `bench.profile`.
"""
