"""What the scheduler does under load, measured on the real server: `python -m bench.scheduling`."""
