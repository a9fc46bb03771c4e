"""Benchmarks of Millrace: the engine, the server and its parts, compared with their peers. See README.md."""
