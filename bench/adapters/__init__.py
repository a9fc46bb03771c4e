"""What LoRA adapters cost: over HTTP `python -m bench.adapters`, in a forward pass `python -m bench.adapters.kernels`.

May import `bench.harness`, `bench.parts` and, for the forward pass, `bench.kernels` and `bench.quantized`.
"""
