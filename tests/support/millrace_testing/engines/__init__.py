"""Drivers and fakes of the shard's engine, batches, sampling and kernels.

Entry point: `engine_driver`.
May import: all planes.
"""
