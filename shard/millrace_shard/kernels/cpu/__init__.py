"""C++ operators for AMX, AVX-512 and AVX2; sources in `csrc`.

Entry point: `operators`.
May import: kernels, device; never kernels.cuda.
"""
