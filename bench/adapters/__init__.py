"""What LoRA adapters cost over HTTP: `python -m bench.adapters`. May import `bench.harness` and `bench.parts`."""
