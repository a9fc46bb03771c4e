"""Command line and environment, checked, and the commands of the children.

Entry points: `arguments.read_settings`, `prepare.prepare`, and the functions of `rank_arguments` for ranks only.
Imports: config, demo, errors, host, logs, millrace_proto, millrace_router, millrace_shard.
"""
