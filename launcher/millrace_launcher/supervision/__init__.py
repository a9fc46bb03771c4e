"""Starts, monitors, restarts and stops router and shards.

Entry points: `launcher.Launcher`, and `rank_host.RankHost` for ranks alone.
Imports: banner, errors, host, logs, millrace_proto, millrace_router, processes, settings.
"""
