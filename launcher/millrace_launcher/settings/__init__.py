"""Command line and environment, checked, and the commands of the children.

Entry points: `arguments.read_settings`, `prepare.prepare`.
May import: demo, logs, config, errors, and the `config` modules of the planes.
"""
