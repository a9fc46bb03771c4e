"""The operators of a forward pass behind one interface; the implementation in plain torch is the oracle.

Entry points: `base.Kernels`, `choose.choose_kernels`.
May import: device. Only `choose` imports both cpu and cuda.
"""
