"""The cost of LoRA adapters on CPU."""
