"""The time of the shard's sampler alone: `python -m bench.sampling`."""
