"""Command line and environment, checked, and the commands of the children.

Entry points: `arguments.read_settings`, `prepare.prepare`, and the functions of `rank_arguments` for ranks only.
May import: host, demo, logs, config, errors, and the `config` modules of the planes.
"""
