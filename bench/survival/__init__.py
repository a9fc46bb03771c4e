"""What breaking the shards costs clients, measured on the real server: `python -m bench.survival`."""
