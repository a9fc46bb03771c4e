"""KV caches that hold codes of 8 bits, in plain torch: the oracle of the compiled kernels.

Entry points: `codes` for the formats, `rows` for caches in rows of positions.
May import: the kernels' `base`.
"""
