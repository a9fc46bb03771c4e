"""No batching, static and continuous batching compared on our own server: `python -m bench.policies`.

Each of `variance` and `latency` is one experiment. All points are simulated too. May import `bench.harness`
and `bench.parts`.
"""
