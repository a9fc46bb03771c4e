"""Kernels for x86 CPUs, by C++ operators for AMX, AVX-512 and AVX2, whose sources are in `csrc`.

Entry point: `operators`.
Imports: kernels, kernels.lora, millrace_proto.
"""
