"""Quantised weights: `python -m bench.quantized` measures their speed against the peers.

`formats.py` writes one random checkpoint in each format. May import `bench.harness`, `bench.comparison` and
`bench.peers`.
"""
