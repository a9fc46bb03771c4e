"""Starts, monitors, restarts and stops router and shards.

Entry points: `launcher.Launcher`, and `rank_host.RankHost` for ranks alone.
May import: processes, settings, host, banner, demo, logs.
"""
