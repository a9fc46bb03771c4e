"""Engine, server and `transformers` on a GPU, beside its measured roofline: `make bench-gpu`."""
