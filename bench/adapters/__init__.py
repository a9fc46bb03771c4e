"""The cost of LoRA adapters, over HTTP and in steps. May import `bench.harness`, `.parts` and `.quantized`."""
