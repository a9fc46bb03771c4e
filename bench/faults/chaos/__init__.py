"""A seeded campaign of random faults under load, and an audit of what is left: `python -m bench.faults.chaos`."""
