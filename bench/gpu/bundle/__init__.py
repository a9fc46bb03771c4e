"""The packages for `make bench-gpu` on a machine with PyTorch and without a network: `python -m bench.gpu.bundle`.

Entry points: `__main__.main`, `files.use_bundle`.
May import: `bench.harness.paths` alone; `files` imports the standard library alone.
"""
