"""The scheduler under load, on the real server: `python -m bench.scheduling`."""
