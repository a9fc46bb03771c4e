"""A long prompt among running streams, on the real server: `python -m bench.scheduling`."""
