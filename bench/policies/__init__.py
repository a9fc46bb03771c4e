"""No batching, static and continuous batching compared on our own server: `python -m bench.policies`.

Each of `variance`, `latency` and `load` is one experiment. All points are simulated too. May import `bench.harness`,
`bench.parts` and `bench.peers`.
"""
