"""Quantised weights: `python -m bench.quantized` their speed, `python -m bench.quantized.memory` the memory of loading.

`formats.py` writes one random checkpoint in each format. May import `bench.harness`, `bench.comparison`, `bench.peers`
and `bench.charts`.
"""
