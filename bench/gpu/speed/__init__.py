"""Stages that measure speed: each module has `run(setting, emit)`, which runs in its own process.

Entry point: `bench.gpu.stage`, which imports one stage by name.
May import: `setting`, `figures`, `goals`, `computed`, `engine`.
"""
