"""The operators of a forward pass behind one interface; the implementation in plain torch is the oracle.

Entry points: `base.Kernels`, `choose.choose_kernels`.
Only `choose` imports both cpu and cuda.
Imports: arrays, device, errors, kernels.cpu, kernels.cuda, kernels.lora, variables.
"""
