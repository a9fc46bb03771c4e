"""What LoRA adapters cost: over HTTP `python -m bench.adapters`, in a forward pass `python -m bench.adapters.kernels`.

Each of `unused`, `mixed`, `zipf`, `loading`, `registered` and `peers` is one experiment. May import `bench.harness`,
`bench.parts`, `bench.peers` and, for the forward pass, `bench.kernels`.
"""
