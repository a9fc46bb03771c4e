"""From the command line and environment to the command of each child.

Entry points: `arguments.Settings`, `commands.Commands`.
May import: config and errors, and the `config` modules of the planes.
"""
