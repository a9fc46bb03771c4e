"""The first hour on a device: every check and figure that a first run on a GPU needs, in one bounded run.

Entry point: `__main__.main` (`make bench-gpu`).
Rooms: `checks` and `speed` hold the stages, which use `engine` (the shard's engine without a server) and `programs`
(their child processes).
"""
