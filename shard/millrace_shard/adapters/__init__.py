"""LoRA adapters of this shard: reads them from the cache folder, packs them for the linears of a rank, holds them.

Entry points: `adapter_store.AdapterStore`, `adapter_store.SequenceAdapters`.
Imports: arrays, errors, kernels.lora.
"""
