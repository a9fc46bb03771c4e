"""Benchmarks of Millrace: the engine, the server and its parts, beside their peers. See README.md."""
