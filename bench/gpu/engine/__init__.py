"""The shard's engine without a server, over random weights, with its sizes, limits and peer.

Entry points: `session.load`, `session.start`, `scale.SCALES`.
May import: `bench.harness`, `bench.peers`, `bench.comparison.roofline`, the shard.
"""
