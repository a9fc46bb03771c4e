"""Speculative decoding on repetitive and on plain text: `python -m bench.speculative_decoding`."""
