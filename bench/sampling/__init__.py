"""What choosing tokens costs a step, measured on the shard's sampler alone: `python -m bench.sampling`."""
