"""From the command line and environment to the command of each child.

Entry points: `arguments.read_settings`, `prepare.prepare`.
May import: demo, logs, config, errors, and the `config` modules of the planes.
"""
